//! Which of two hosts may write to a disk: the rules alone, without I/O.
//!
//! The *sender* has the disk first, the *receiver* a copy of it. Each has one durable state. The rules:
//!
//! 1. The sender is [`Leaving`](Sender::Leaving), durably, before it asks the receiver to take the disk. Before that the
//!    copy is complete and durable. A sender that is leaving opens nothing.
//! 2. The receiver is [`Taken`](Receiver::Taken), durably, before it answers so, and before it opens the disk.
//! 3. [`Taken`](Receiver::Taken) and [`Aborted`](Receiver::Aborted) are final: a later request gets the same answer.
//! 4. A receiver that does not know a migration is asked to abort it: it notes that as aborted. Asked to take it, it
//!    refuses.
//! 5. The sender has the disk again only if the receiver says that it is aborted. Time alone changes nothing.
//! 6. The answer "taken" makes the sender [`Moved`](Sender::Moved), for good, in whatever state.
//!
//! Messages may be lost, repeated, late, and out of order. An administrator may [decide](Sender::decide) for a side that
//! cannot reach the other one; that is right if the same is decided for both.

use serde::{Deserialize, Serialize};

/// The durable state of the sender.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Sender {
    /// It has the disk.
    Owner,
    /// The receiver may have the disk.
    Leaving,
    /// The receiver has the disk.
    Moved,
}

/// The durable state of the receiver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Receiver {
    /// It has a copy that the sender writes.
    Incoming,
    /// It has the disk.
    Taken,
    /// It never gets the disk.
    Aborted,
}

/// The request of the sender.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// To take the disk.
    Take,
    /// To give the migration up.
    Abort,
}

impl Sender {
    /// Whether its image may be opened for writing.
    pub fn opens(self) -> bool {
        self == Sender::Owner
    }

    /// Its request now. `gives_up`: the migration is to be aborted.
    pub fn request(self, gives_up: bool) -> Option<Request> {
        match (self, gives_up) {
            (Sender::Leaving | Sender::Owner, true) => Some(Request::Abort),
            (Sender::Leaving, false) => Some(Request::Take),
            (Sender::Owner, false) | (Sender::Moved, _) => None,
        }
    }

    /// The state after an answer of the receiver.
    #[must_use]
    pub fn after(self, answer: Receiver) -> Sender {
        match (self, answer) {
            (_, Receiver::Taken) => Sender::Moved,
            (Sender::Leaving, Receiver::Aborted) => Sender::Owner,
            (state, _) => state,
        }
    }

    /// The state after an administrator has said that the disk is `here`. `None`: it is not in doubt.
    #[must_use]
    pub fn decide(self, here: bool) -> Option<Sender> {
        match self {
            Sender::Leaving => Some(if here { Sender::Owner } else { Sender::Moved }),
            Sender::Owner | Sender::Moved => None,
        }
    }
}

impl Receiver {
    /// Whether its image may be opened for writing, but by the sender.
    pub fn opens(self) -> bool {
        self == Receiver::Taken
    }

    /// The state after a request. `None`: this migration is not known. It is durable before it is the answer.
    #[must_use]
    pub fn after(known: Option<Receiver>, request: Request) -> Option<Receiver> {
        match (known, request) {
            (Some(Receiver::Incoming), Request::Take) => Some(Receiver::Taken),
            (Some(Receiver::Incoming) | None, Request::Abort) => Some(Receiver::Aborted),
            (Some(last), _) => Some(last),
            (None, Request::Take) => None,
        }
    }

    /// The state after an administrator has said that the disk is `here`. `None`: it is decided.
    #[must_use]
    pub fn decide(self, here: bool) -> Option<Receiver> {
        match self {
            Receiver::Incoming => Some(if here { Receiver::Taken } else { Receiver::Aborted }),
            Receiver::Taken | Receiver::Aborted => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use ferrite_host::clock::{Random as _, SplitMix64};

    use super::*;

    /// The rules as both programs carry them out. A test takes one out.
    #[derive(Clone, Copy)]
    struct Rules {
        /// Whether the sender is leaving, durably, before it asks.
        marks_first: bool,
        /// Whether the receiver's state is durable before it answers.
        takes_first: bool,
        request: fn(Sender, bool) -> Option<Request>,
        sender: fn(Sender, Receiver) -> Sender,
        receiver: fn(Option<Receiver>, Request) -> Option<Receiver>,
        /// The state of the sender after it has waited for long.
        late: fn(Sender) -> Sender,
    }

    const RULES: Rules = Rules {
        marks_first: true,
        takes_first: true,
        request: Sender::request,
        sender: Sender::after,
        receiver: Receiver::after,
        late: |state| state,
    };

    /// Two hosts and what is on the way between them. Each host has a durable state, and one in memory that is written
    /// some time later.
    struct World {
        rules: Rules,
        sender: Sender,
        sender_memory: Sender,
        receiver: Option<Receiver>,
        receiver_memory: Option<Receiver>,
        gives_up: bool,
        requests: Vec<Request>,
        answers: Vec<Receiver>,
        /// Which side has written since the copy was complete: the sender, the receiver.
        writers: [bool; 2],
    }

    impl World {
        fn new(rules: Rules) -> World {
            let incoming = Some(Receiver::Incoming);
            World {
                rules,
                sender: Sender::Owner,
                sender_memory: Sender::Owner,
                receiver: incoming,
                receiver_memory: incoming,
                gives_up: false,
                requests: Vec::new(),
                answers: Vec::new(),
                writers: [false; 2],
            }
        }

        fn answer(&mut self, request: Request) {
            let after = (self.rules.receiver)(self.receiver_memory, request);
            self.receiver_memory = after;
            if self.rules.takes_first {
                self.receiver = after;
            }
            self.answers.extend(after);
        }

        /// One random step. Messages stay on the way after they have come: they may come again.
        fn step(&mut self, random: &mut SplitMix64) {
            match random.below(12) {
                // The copy is complete: the sender leaves.
                0 if self.sender_memory == Sender::Owner && !self.gives_up => {
                    self.sender_memory = Sender::Leaving;
                    if self.rules.marks_first {
                        self.sender = Sender::Leaving;
                    }
                }
                1 => self.requests.extend((self.rules.request)(self.sender_memory, self.gives_up)),
                2 if random.below(4) == 0 => self.gives_up = true,
                3 | 4 if !self.requests.is_empty() => {
                    let at = random.below(self.requests.len() as u64) as usize;
                    self.answer(self.requests[at]);
                }
                5 | 6 if !self.answers.is_empty() => {
                    let at = random.below(self.answers.len() as u64) as usize;
                    let before = self.sender_memory;
                    self.sender_memory = (self.rules.sender)(before, self.answers[at]);
                    self.sender = self.sender_memory;
                }
                7 => self.sender = self.sender_memory,
                8 => self.receiver = self.receiver_memory,
                9 => self.sender_memory = (self.rules.late)(self.sender_memory),
                // A power cut of either side.
                10 => self.sender_memory = self.sender,
                11 => self.receiver_memory = self.receiver,
                _ => {}
            }
            if random.below(16) == 0 {
                self.requests.clear();
            }
            if random.below(16) == 0 {
                self.answers.clear();
            }
            self.write();
        }

        /// Each side that may open the disk opens it and writes. Writes of the sender are copied again, as long as the
        /// receiver has not taken the disk.
        fn write(&mut self) {
            let receives = self.receiver_memory.is_some_and(Receiver::opens);
            let sends = self.sender_memory.opens() || self.sender.opens();
            self.writers[1] |= receives;
            self.writers[0] |= sends && self.writers[1];
        }

        /// Both run, reach each other, and nothing is lost any more.
        fn settle(&mut self) {
            self.receiver_memory = self.receiver;
            self.sender_memory = self.sender;
            for _ in 0..4 {
                if let Some(request) = (self.rules.request)(self.sender_memory, self.gives_up) {
                    self.answer(request);
                    if let Some(answer) = self.answers.last() {
                        self.sender_memory = (self.rules.sender)(self.sender_memory, *answer);
                    }
                }
                (self.sender, self.receiver) = (self.sender_memory, self.receiver_memory);
                self.write();
            }
        }
    }

    /// The fault after a random history.
    fn wrong(rules: Rules, seed: u64) -> Option<&'static str> {
        let mut random = SplitMix64::new(seed);
        let mut world = World::new(rules);
        for _ in 0..random.below(60) {
            world.step(&mut random);
            if world.writers == [true; 2] {
                return Some("both write");
            }
        }
        world.settle();
        let opens = [world.sender.opens(), world.receiver.is_some_and(Receiver::opens)];
        match (world.writers, opens) {
            ([true, true], _) => Some("both write"),
            (_, [true, true]) => Some("both open"),
            (_, [false, false]) => Some("none opens for good"),
            _ => None,
        }
    }

    fn finds(rules: Rules) -> Option<u64> {
        (0..20_000).find(|seed| wrong(rules, *seed).is_some())
    }

    #[test]
    fn exactly_one_side_writes_whatever_is_lost_and_whoever_crashes() {
        for seed in 0..100_000 {
            assert_eq!(wrong(RULES, seed), None, "seed {seed}");
        }
    }

    #[test]
    fn each_rule_that_is_left_out_is_noticed() {
        let broken: [(&str, Rules); 7] = [
            ("the mark comes before the request", Rules { marks_first: false, ..RULES }),
            ("the receiver's state comes before its answer", Rules { takes_first: false, ..RULES }),
            (
                "aborted is final",
                Rules {
                    receiver: |known, request| match (known, request) {
                        (Some(Receiver::Aborted), Request::Take) => Some(Receiver::Taken),
                        (known, request) => Receiver::after(known, request),
                    },
                    ..RULES
                },
            ),
            (
                "taken is final",
                Rules {
                    receiver: |known, request| match (known, request) {
                        (Some(Receiver::Taken), Request::Abort) => Some(Receiver::Aborted),
                        (known, request) => Receiver::after(known, request),
                    },
                    ..RULES
                },
            ),
            (
                "time changes nothing",
                Rules {
                    late: |state| if state == Sender::Leaving { Sender::Owner } else { state },
                    ..RULES
                },
            ),
            (
                "only an abort gives the disk back",
                Rules {
                    sender: |state, answer| match (state, answer) {
                        (Sender::Leaving, Receiver::Incoming) => Sender::Owner,
                        (Sender::Leaving, Receiver::Taken) => Sender::Owner,
                        (state, answer) => state.after(answer),
                    },
                    ..RULES
                },
            ),
            (
                "a sender that is leaving asks again",
                Rules {
                    request: |state, gives_up| match state {
                        Sender::Leaving => None,
                        state => state.request(gives_up),
                    },
                    ..RULES
                },
            ),
        ];
        for (rule, rules) in broken {
            assert!(finds(rules).is_some(), "no history fails without: {rule}");
        }
    }

    #[test]
    fn an_administrator_decides_only_what_is_in_doubt() {
        assert_eq!(Sender::Owner.decide(false), None);
        assert_eq!(Sender::Moved.decide(true), None);
        assert_eq!(Sender::Leaving.decide(true), Some(Sender::Owner));
        assert_eq!(Receiver::Taken.decide(false), None);
        assert_eq!(Receiver::Aborted.decide(true), None);
        // A decision for both sides leaves one that opens.
        for here in [true, false] {
            let (sender, receiver) =
                (Sender::Leaving.decide(here).unwrap(), Receiver::Incoming.decide(!here).unwrap());
            assert!(sender.opens() != receiver.opens());
        }
    }
}
