use std::collections::HashMap;
use std::task::{Context, Poll, Waker};

use proptest::prelude::*;

use super::*;

#[test]
fn what_was_removed_is_nobodys_when_all_who_entered_before_have_left() {
    let epochs = Epochs::new();
    let (a, b) = (epochs.reader(), epochs.reader());
    let (first, second) = (a.enter(), b.enter());
    let removed = epochs.removed();
    for _ in 0..5 {
        assert!(epochs.ended() < removed);
    }
    a.leave(first);
    assert!(epochs.ended() < removed);
    // Operations that enter after the removal do not matter, however many are in flight.
    let mut later = a.enter();
    b.leave(second);
    for _ in 0..2 {
        let next = a.enter();
        a.leave(later);
        later = next;
        epochs.ended();
    }
    assert!(epochs.ended() >= removed);
    a.leave(later);
}

#[test]
fn an_operation_that_was_kept_outlives_the_sweep_that_mapped_it() {
    let epochs = Epochs::new();
    let reader = epochs.reader();
    let sweep = reader.enter();
    let operation = reader.keep(sweep);
    reader.leave(sweep);
    let removed = epochs.removed();
    epochs.ended();
    assert!(epochs.ended() < removed);
    reader.leave(operation);
    assert!(epochs.ended() >= removed);
}

/// A queue that fails, and a task that is cancelled, may have operations in the kernel.
#[test]
fn what_ends_without_a_word_counts_for_good() {
    let epochs = Epochs::new();
    let (clean, failed) = (epochs.reader(), epochs.reader());
    let mark = clean.enter();
    clean.leave(mark);
    drop(clean);
    let before = epochs.removed();
    assert!(epochs.ended() >= before);
    let _under_way = failed.enter();
    drop(failed);
    let removed = epochs.removed();
    (0..5).for_each(|_| assert!(epochs.ended() < removed));

    let epochs = Epochs::new();
    let mut task = Box::pin(epochs.during(std::future::pending::<()>()));
    assert_eq!(task.as_mut().poll(&mut Context::from_waker(Waker::noop())), Poll::Pending);
    drop(task);
    let removed = epochs.removed();
    (0..5).for_each(|_| assert!(epochs.ended() < removed));
}

#[test]
fn a_task_counts_until_its_end() {
    let epochs = Epochs::new();
    let mut removed = 0;
    let steps = async {
        removed = epochs.removed();
        epochs.ended();
        assert!(epochs.ended() < removed);
    };
    let mut task = Box::pin(epochs.during(steps));
    assert_eq!(task.as_mut().poll(&mut Context::from_waker(Waker::noop())), Poll::Ready(()));
    drop(task);
    assert!(epochs.ended() >= removed);
}

#[derive(Clone, Debug)]
enum Step {
    Join,
    /// Of the queue with this number, modulo the number of queues.
    End(usize),
    Enter(usize),
    Leave(usize),
    Remove,
    Look,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        1 => Just(Step::Join),
        1 => (0..8usize).prop_map(Step::End),
        6 => (0..8usize).prop_map(Step::Enter),
        6 => (0..64usize).prop_map(Step::Leave),
        3 => Just(Step::Remove),
        5 => Just(Step::Look),
    ];
    prop::collection::vec(step, 1..80)
}

proptest! {
    #[test]
    fn a_place_is_nobodys_just_when_nobody_is_left_who_may_have_been_told_of_it(steps in steps()) {
        let epochs = Epochs::new();
        let mut queues: Vec<Option<Reader>> = Vec::new();
        // By number: an operation's queue and its mark.
        let mut under_way: HashMap<usize, (usize, Mark)> = HashMap::new();
        // The epochs of removals, and the operations in flight at that time.
        let mut removed: Vec<(u64, Vec<usize>)> = Vec::new();
        let mut lost = Vec::new();
        let mut number = 0;
        for step in steps {
            let there: Vec<usize> = (0..queues.len()).filter(|i| queues[*i].is_some()).collect();
            match step {
                Step::Join => queues.push(Some(epochs.reader())),
                Step::End(i) if !there.is_empty() => {
                    let queue = there[i % there.len()];
                    queues[queue] = None;
                    let of_it = under_way.extract_if(|_, (of, _)| *of == queue);
                    lost.extend(of_it.map(|(operation, _)| operation));
                }
                Step::Enter(i) if !there.is_empty() => {
                    let queue = there[i % there.len()];
                    let Some(reader) = &queues[queue] else { unreachable!() };
                    under_way.insert(number, (queue, reader.enter()));
                    number += 1;
                }
                Step::Leave(i) if !under_way.is_empty() => {
                    let mut all: Vec<usize> = under_way.keys().copied().collect();
                    all.sort_unstable();
                    let (queue, mark) = under_way.remove(&all[i % all.len()]).unwrap();
                    queues[queue].as_ref().unwrap().leave(mark);
                }
                Step::Remove => {
                    let all = under_way.keys().chain(&lost).copied().collect();
                    removed.push((epochs.removed(), all));
                }
                Step::End(_) | Step::Enter(_) | Step::Leave(_) | Step::Look => {}
            }
            let ended = epochs.ended();
            let is_left = |i: &usize| under_way.contains_key(i) || lost.contains(i);
            for (epoch, readers) in &removed {
                prop_assert!(*epoch > ended || !readers.iter().any(is_left));
            }
        }
        // Without operations in flight all places are unused at once.
        for (queue, mark) in under_way.values() {
            queues[*queue].as_ref().unwrap().leave(*mark);
        }
        let last = epochs.removed();
        prop_assert_eq!(epochs.ended() >= last, lost.is_empty());
    }
}

/// A processor may move a load before an earlier store. Each round has its own counts and its own mapping: one thread
/// enters and reads the mapping, one removes it and reads the counts.
#[test]
fn of_who_enters_and_who_removes_one_sees_the_other() {
    let all = ferrite_testkit::rounds(30_000) as usize;
    /// More than the other thread needs if it runs. If it does not, this one must let it.
    const LOOKS: u32 = 10_000;
    type Real = Core<AtomicU64, Mutex<Queues<AtomicU64>>>;
    let core = Real::new();
    let rounds: Vec<_> =
        (0..all).map(|_| (Counts::<AtomicU64>::new(), AtomicU64::new(0))).collect();
    let begun = AtomicU64::new(0);
    let done = AtomicU64::new(0);
    let wait = |word: &AtomicU64, value: usize| {
        while word.load(Ordering::Acquire) < value as u64 {
            std::thread::yield_now();
        }
    };
    std::thread::scope(|scope| {
        let entering = scope.spawn(|| {
            let enter = |(i, (counts, mapping)): (usize, &(Counts<AtomicU64>, AtomicU64))| {
                let mut looks = 0;
                while begun.load(Ordering::Acquire) <= i as u64 {
                    looks += 1;
                    match looks < LOOKS {
                        true => std::hint::spin_loop(),
                        false => std::thread::yield_now(),
                    }
                }
                let _mark = core.enter(counts);
                let told = mapping.load(Ordering::Relaxed) == 0;
                done.store(i as u64 + 1, Ordering::Release);
                told
            };
            rounds.iter().enumerate().map(enter).collect::<Vec<bool>>()
        });
        let remove = |(i, (counts, mapping)): (usize, &(Counts<AtomicU64>, AtomicU64))| {
            wait(&done, i);
            begun.store(i as u64 + 1, Ordering::Release);
            (0..i % 256).for_each(|_| std::hint::spin_loop());
            mapping.store(1, Ordering::Relaxed);
            core.removed();
            counts.are_zero()
        };
        let unseen: Vec<bool> = rounds.iter().enumerate().map(remove).collect();
        let told = entering.join().unwrap();
        let missed = told.iter().zip(&unseen).filter(|(told, unseen)| **told && **unseen);
        assert_eq!(missed.count(), 0, "of {all}");
    });
}

/// All threads' steps in orders that a scheduler chooses.
mod shuttle_tests {
    use std::sync::Arc;

    use ferrite_testkit::rounds;
    use shuttle::sync::Mutex;
    use shuttle::sync::atomic::{AtomicU64, Ordering::SeqCst};
    use shuttle::thread;

    use super::super::{Core, Queues};

    struct World {
        core: Core<AtomicU64, Mutex<Queues<AtomicU64>>>,
        /// The place that readers get.
        mapping: AtomicU64,
        /// By place: it was reused.
        given: [AtomicU64; PLACES],
    }

    const PLACES: usize = 3;

    impl World {
        fn use_a_place(&self) {
            let place = self.mapping.load(SeqCst) as usize;
            thread::yield_now();
            assert_eq!(self.given[place].load(SeqCst), 0, "place {place} is another's");
        }

        /// Reuses the places that are unused.
        fn give(&self, removed: &[(u64, usize)]) {
            let ended = self.core.ended();
            let nobodys = removed.iter().filter(|(epoch, _)| *epoch <= ended);
            nobodys.for_each(|(_, place)| self.given[*place].store(1, SeqCst));
        }
    }

    /// Two queues, one of which comes and goes, a task, a thread that removes, and one that advances the epoch
    /// meanwhile.
    fn all_at_once() {
        let world = Arc::new(World {
            core: Core::new(),
            mapping: AtomicU64::new(0),
            given: [const { AtomicU64::new(0) }; PLACES],
        });
        let of = |world: &Arc<World>, work: fn(&World)| {
            let world = world.clone();
            thread::spawn(move || work(&world))
        };
        let threads = [
            of(&world, |world| {
                let counts = world.core.join();
                for _ in 0..3 {
                    let mark = world.core.enter(&counts);
                    world.use_a_place();
                    counts.subtract_own(mark);
                }
            }),
            of(&world, |world| {
                for _ in 0..2 {
                    let counts = world.core.join();
                    let mark = world.core.enter(&counts);
                    world.use_a_place();
                    counts.subtract_own(mark);
                    world.core.part(&counts);
                }
            }),
            of(&world, |world| {
                let mark = world.core.enter_task();
                world.use_a_place();
                world.core.leave_task(mark);
            }),
            of(&world, |world| {
                let mut removed = Vec::new();
                for place in 1..PLACES {
                    world.mapping.store(place as u64, SeqCst);
                    removed.push((world.core.removed(), place - 1));
                    world.give(&removed);
                }
                world.give(&removed);
            }),
            of(&world, |world| {
                for _ in 0..3 {
                    world.core.ended();
                }
            }),
        ];
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    }

    /// A task that has seen a much earlier epoch, a thread that removes, and a step that began before that.
    fn a_step_under_way() {
        let world = Arc::new(World {
            core: Core::new(),
            mapping: AtomicU64::new(0),
            given: [const { AtomicU64::new(0) }; PLACES],
        });
        let (task, steps) = (world.clone(), world.clone());
        let task = thread::spawn(move || {
            let mark = task.core.enter_task();
            task.use_a_place();
            task.core.leave_task(mark);
        });
        let steps = thread::spawn(move || {
            for _ in 0..2 {
                steps.core.ended();
            }
        });
        world.mapping.store(1, SeqCst);
        let removed = [(world.core.removed(), 0)];
        (0..2).for_each(|_| world.give(&removed));
        task.join().unwrap();
        steps.join().unwrap();
    }

    #[test]
    fn a_step_that_began_before_a_removal_is_none_after_it() {
        shuttle::check_random(a_step_under_way, rounds(30_000) as usize);
        shuttle::check_pct(a_step_under_way, rounds(30_000) as usize, 5);
    }

    #[test]
    fn nobody_uses_a_place_that_was_given_to_somebody_else() {
        shuttle::check_random(all_at_once, rounds(10_000) as usize);
        shuttle::check_pct(all_at_once, rounds(5_000) as usize, 4);
    }
}
