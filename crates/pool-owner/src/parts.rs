//! A request of the user, whose parts go to sets.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use ferrite_helper::Done;

/// The common of all parts of a request.
pub(crate) struct Parts(Mutex<Inner>);

struct Inner {
    left: usize,
    bytes: usize,
    /// The data that were read.
    data: Vec<u8>,
    error: Option<i32>,
    done: Option<Done>,
}

/// One part. It is told how it has ended.
pub(crate) struct Part {
    of: Arc<Parts>,
    /// Its place in the data of a read.
    place: Range<usize>,
}

/// The end of a part that is to be told, with no lock held.
pub(crate) struct Ended {
    part: Part,
    result: Result<Vec<u8>, i32>,
}

impl Parts {
    /// A request of so many bytes and parts, at least one. `data` takes what is read.
    pub(crate) fn new(parts: usize, bytes: usize, data: Vec<u8>, done: Done) -> Arc<Parts> {
        let inner = Inner { left: parts, bytes, data, error: None, done: Some(done) };
        Arc::new(Parts(Mutex::new(inner)))
    }

    /// One of its parts.
    pub(crate) fn part(self: &Arc<Parts>, place: Range<usize>) -> Part {
        Part { of: self.clone(), place }
    }
}

impl Part {
    /// Its end, with what it has read.
    pub(crate) fn ended(self, result: Result<Vec<u8>, i32>) -> Ended {
        Ended { part: self, result }
    }
}

impl Ended {
    /// Notes the end; the last one answers the request.
    pub(crate) fn tell(self) {
        let Ended { part: Part { of, place }, result } = self;
        let mut inner = of.0.lock().unwrap_or_else(PoisonError::into_inner);
        match result {
            // Of a single part: nothing is copied.
            Ok(found) if found.len() == inner.data.len() => inner.data = found,
            Ok(found) => {
                if let Some(into) = inner.data.get_mut(place).filter(|it| it.len() == found.len()) {
                    into.copy_from_slice(&found);
                }
            }
            Err(errno) => inner.error = Some(errno),
        }
        inner.left = inner.left.saturating_sub(1);
        if inner.left > 0 {
            return;
        }
        let (data, bytes, error) = (std::mem::take(&mut inner.data), inner.bytes, inner.error);
        let done = inner.done.take();
        drop(inner);
        if let Some(done) = done {
            done(error.map_or(Ok(bytes), Err), data);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn the_last_part_answers_with_all_data_or_an_error() {
        for fails in [false, true] {
            let (tell, told) = channel();
            let done: Done = Box::new(move |result, data| tell.send((result, data)).unwrap());
            let parts = Parts::new(2, 4, vec![0; 4], done);
            let (first, second) = (parts.part(0..2), parts.part(2..4));
            second.ended(Ok(vec![3, 4])).tell();
            assert!(told.try_recv().is_err());
            first.ended(if fails { Err(5) } else { Ok(vec![1, 2]) }).tell();
            let (result, data) = told.recv().unwrap();
            match fails {
                false => assert_eq!((result, data), (Ok(4), vec![1, 2, 3, 4])),
                true => assert_eq!(result, Err(5)),
            }
        }
    }
}
