//! The threads that serve a connection: one receives, one does what has come.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};

use super::{Code, REPLY_BYTES, REQUEST_BYTES, State, Store};

/// A request that has come whole.
struct Request {
    code: Code,
    number: u64,
    offset: usize,
    len: usize,
    data: Vec<u8>,
}

#[derive(Default)]
struct Requests {
    waiting: Vec<Request>,
    ended: bool,
}

/// Serves this connection until its end.
pub(super) fn serve(store: &Arc<Store>, stream: UnixStream) -> io::Result<()> {
    let (reading, kept) = (stream.try_clone()?, stream.try_clone()?);
    store.change(|state| {
        state.threads += 2;
        state.connections.push(kept);
    });
    let requests = Arc::<Mutex<Requests>>::default();
    let (store_, requests_) = (store.clone(), requests.clone());
    std::thread::spawn(move || {
        // An error is the end of the connection.
        let _ = receive(&store_, reading, &requests_);
        store_.change(|state| {
            requests_.lock().unwrap().ended = true;
            state.threads -= 1;
        });
    });
    let store = store.clone();
    std::thread::spawn(move || {
        let _ = reply(&store, &stream, &requests);
        let _ = stream.shutdown(std::net::Shutdown::Both);
        store.change(|state| state.threads -= 1);
    });
    Ok(())
}

fn receive(store: &Store, mut stream: UnixStream, requests: &Mutex<Requests>) -> io::Result<()> {
    loop {
        let mut header = [0; REQUEST_BYTES];
        stream.read_exact(&mut header)?;
        let word = |i: usize| u64::from_le_bytes(header[i * 8..][..8].try_into().unwrap());
        let code = Code::ALL[word(0) as usize];
        let (number, offset, len) = (word(1), word(2) as usize, word(3) as usize);
        let mut data = vec![0; if code == Code::Write { len } else { 0 }];
        stream.read_exact(&mut data)?;
        store.change(|state| {
            requests.lock().unwrap().waiting.push(Request { code, number, offset, len, data });
            state.received += 1;
        });
    }
}

/// Does and replies to what has come, the last first.
fn reply(store: &Store, mut stream: &UnixStream, requests: &Mutex<Requests>) -> io::Result<()> {
    loop {
        let bytes = {
            let idle = |state: &mut State| {
                let requests = requests.lock().unwrap();
                !requests.ended && (state.held || requests.waiting.is_empty())
            };
            let mut state = store.changed.wait_while(store.state(), idle).unwrap();
            let mut requests = requests.lock().unwrap();
            if requests.ended {
                return Ok(());
            }
            let Some(request) = requests.waiting.pop() else { continue };
            state.execute(&request)
        };
        stream.write_all(&bytes)?;
    }
}

impl State {
    /// The reply to a request that has been done.
    fn execute(&mut self, request: &Request) -> Vec<u8> {
        let Request { code, offset, .. } = *request;
        let transfers = matches!(code, Code::Read | Code::Write);
        let most = if transfers && self.most > 0 { self.most } else { usize::MAX };
        let len = request.len.min(most).min(self.bytes.len().saturating_sub(offset));
        let range = offset..offset + len;
        let (mut count, mut data) = (len as u64, Vec::new());
        if let Some(errno) = self.errno {
            return header(request.number, errno as u64, 0);
        }
        self.done.push(code);
        match code {
            Code::Read => data = self.bytes[range].to_vec(),
            Code::Write => self.bytes[range].copy_from_slice(&request.data[..len]),
            Code::Sync => count = 0,
            Code::Zero => self.bytes[range].fill(0),
            Code::Allocation => {
                let zeros = self.bytes[offset] == 0;
                let same = self.bytes[range].iter().take_while(|byte| (**byte == 0) == zeros);
                count = same.count() as u64 * 2 + u64::from(zeros);
            }
        }
        [header(request.number, 0, count), data].concat()
    }
}

fn header(number: u64, errno: u64, count: u64) -> Vec<u8> {
    let bytes = [number, errno, count].map(u64::to_le_bytes).concat();
    assert_eq!(bytes.len(), REPLY_BYTES);
    bytes
}
