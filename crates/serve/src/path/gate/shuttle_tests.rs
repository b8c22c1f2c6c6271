//! The gate under a scheduler that tries interleavings.

use std::sync::Arc;

use ferrite_testkit::rounds;
use shuttle::sync::atomic::{AtomicU32, Ordering::SeqCst};
use shuttle::sync::{Condvar, Mutex};
use shuttle::thread;

use super::{Side, Word};

type Gate = super::Gate<AtomicU32>;

impl Word for AtomicU32 {
    fn holding(value: u32) -> Self {
        AtomicU32::new(value)
    }
    fn load(&self) -> u32 {
        self.load(SeqCst)
    }
    fn store(&self, value: u32) {
        self.store(value, SeqCst);
    }
    fn swap(&self, value: u32) -> u32 {
        self.swap(value, SeqCst)
    }
    fn replace(&self, old: u32, new: u32) -> Result<u32, u32> {
        self.compare_exchange(old, new, SeqCst, SeqCst)
    }
}

/// Three queues, each now working, now alone: no queue ever works beside one that is alone.
#[test]
fn no_queue_works_beside_the_one_that_is_alone() {
    shuttle::check_random(
        || {
            let gate = Arc::new(Gate::new(3));
            (0..3).for_each(|member| assert_eq!(gate.join(Side::First), Some(member)));
            let working = Arc::new(AtomicU32::new(0));
            let threads: Vec<_> = (0..3)
                .map(|me| {
                    let (gate, working) = (gate.clone(), working.clone());
                    thread::spawn(move || {
                        for round in 0..3 {
                            if (round + me) % 2 == 0 {
                                while !gate.enter(me) {
                                    gate.leave(me, false);
                                    thread::yield_now();
                                }
                                working.fetch_add(1, SeqCst);
                                thread::yield_now();
                                working.fetch_sub(1, SeqCst);
                                gate.leave(me, false);
                            } else if gate.close(me) {
                                while !gate.others_idle(me) {
                                    thread::yield_now();
                                }
                                assert_eq!(working.load(SeqCst), 0);
                                thread::yield_now();
                                assert_eq!(working.load(SeqCst), 0);
                                gate.open(me);
                            }
                        }
                    })
                })
                .collect();
            for t in threads {
                t.join().unwrap();
            }
        },
        2000,
    );
}

/// A queue's thread asleep, and what wakes it.
#[derive(Default)]
struct Bell(Mutex<bool>, Condvar);

impl Bell {
    fn ring(&self) {
        *self.0.lock().unwrap() = true;
        self.1.notify_one();
    }

    fn wait(&self) {
        let mut rung = self.0.lock().unwrap();
        while !*rung {
            rung = self.1.wait(rung).unwrap();
        }
        *rung = false;
    }
}

/// Works once, as a queue does: it waits until it is woken if it cannot take work now.
fn work(gate: &Gate, bells: &[Bell], me: usize, working: &AtomicU32) {
    while !gate.enter(me) {
        gate.leave(me, false)
            .and_then(|w| w.holder)
            .into_iter()
            .for_each(|holder| bells[holder].ring());
        bells[me].wait();
    }
    working.fetch_add(1, SeqCst);
    thread::yield_now();
    working.fetch_sub(1, SeqCst);
    gate.leave(me, false)
        .and_then(|w| w.holder)
        .into_iter()
        .for_each(|holder| bells[holder].ring());
}

/// Is alone once.
fn be_alone(gate: &Gate, bells: &[Bell], me: usize, working: &AtomicU32) {
    loop {
        if !gate.close(me) {
            gate.leave(me, false)
                .and_then(|w| w.holder)
                .into_iter()
                .for_each(|holder| bells[holder].ring());
        } else if gate.others_idle(me) {
            break;
        }
        bells[me].wait();
    }
    assert_eq!(working.load(SeqCst), 0);
    thread::yield_now();
    assert_eq!(working.load(SeqCst), 0);
    gate.open(me);
    bells.iter().for_each(Bell::ring);
}

/// The same with sleep in place of spinning: a wake-up that got lost would be a deadlock,
/// which the scheduler reports.
#[test]
fn nobody_sleeps_for_ever() {
    let body = || {
        let gate = Arc::new(Gate::new(3));
        (0..3).for_each(|member| assert_eq!(gate.join(Side::First), Some(member)));
        let bells: Arc<[Bell; 3]> = Arc::default();
        let working = Arc::new(AtomicU32::new(0));
        let threads: Vec<_> = (0..3)
            .map(|me| {
                let (gate, bells, working) = (gate.clone(), bells.clone(), working.clone());
                thread::spawn(move || {
                    for round in 0..3 {
                        match (round + me) % 2 {
                            0 => work(&gate, &*bells, me, &working),
                            _ => be_alone(&gate, &*bells, me, &working),
                        }
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|t| t.join().unwrap());
    };
    shuttle::check_random(body, rounds(5000) as usize);
    shuttle::check_pct(body, rounds(2000) as usize, 3);
}

/// Two queues of a guest and two of its stub domain, each with some work: no two sides ever work at
/// the same time, and a wake-up that got lost would be a deadlock.
#[test]
fn two_sides_never_work_at_once_and_none_sleeps_for_ever() {
    let body = || {
        let gate = Arc::new(Gate::new(4));
        let sides = [Side::First, Side::First, Side::Second, Side::Second];
        sides.into_iter().for_each(|side| assert!(gate.join(side).is_some()));
        let bells: Arc<[Bell; 4]> = Arc::default();
        let working: Arc<[AtomicU32; 2]> = Arc::new([AtomicU32::new(0), AtomicU32::new(0)]);
        let threads: Vec<_> = (0..4)
            .map(|me| {
                let (gate, bells, working) = (gate.clone(), bells.clone(), working.clone());
                let leave = move |gate: &Gate, bells: &[Bell]| {
                    if gate.leave(me, false).is_some_and(|wanted| wanted.side) {
                        bells.iter().for_each(Bell::ring);
                    }
                };
                thread::spawn(move || {
                    for _ in 0..3 {
                        while !gate.enter(me) {
                            leave(&gate, &*bells);
                            if gate.wish(me) {
                                bells.iter().for_each(Bell::ring);
                            }
                            bells[me].wait();
                        }
                        let side = sides[me] as usize;
                        working[side].fetch_add(1, SeqCst);
                        assert_eq!(working[1 - side].load(SeqCst), 0);
                        thread::yield_now();
                        assert_eq!(working[1 - side].load(SeqCst), 0);
                        working[side].fetch_sub(1, SeqCst);
                        leave(&gate, &*bells);
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|t| t.join().unwrap());
    };
    shuttle::check_random(body, rounds(5000) as usize);
    shuttle::check_pct(body, rounds(2000) as usize, 3);
}
