//! The switch alone: who receives a frame.

use ferrite_net::switch::{Mac, PortId, Refused, Source, Switch, SwitchError, Target};
use proptest::prelude::*;

fn mac(last: u8) -> Mac {
    Mac([0x00, 0x16, 0x3e, 0, 0, last])
}

fn frame(to: Mac, from: Mac) -> Vec<u8> {
    [&to.0[..], &from.0, &[8, 0]].concat()
}

fn routed(switch: &Switch, from: Source, to: Mac, by: Mac) -> Result<Vec<Target>, Refused> {
    let mut targets = vec![Target::Uplink; 3];
    switch.route(from, &frame(to, by), &mut targets).map(|()| targets)
}

const ALL: Mac = Mac([0xff; 6]);

#[test]
fn a_frame_goes_to_the_port_of_its_address_alone() {
    let mut switch = Switch::new(true);
    let (a, b) = (switch.add(mac(1)).unwrap(), switch.add(mac(2)).unwrap());
    assert_eq!(routed(&switch, Source::Port(a), mac(2), mac(1)), Ok(vec![Target::Port(b)]));
    assert_eq!(routed(&switch, Source::Uplink, mac(1), mac(9)), Ok(vec![Target::Port(a)]));
    assert_eq!(routed(&switch, Source::Port(a), mac(1), mac(1)), Ok(vec![]), "not to itself");
}

#[test]
fn unknown_addresses_are_outside_and_groups_are_everywhere_else() {
    for uplink in [false, true] {
        let mut switch = Switch::new(uplink);
        let (a, b) = (switch.add(mac(1)).unwrap(), switch.add(mac(2)).unwrap());
        let outside: Vec<_> = uplink.then_some(Target::Uplink).into_iter().collect();
        assert_eq!(routed(&switch, Source::Port(a), mac(7), mac(1)), Ok(outside.clone()));
        let others = [vec![Target::Port(b)], outside].concat();
        assert_eq!(routed(&switch, Source::Port(a), ALL, mac(1)), Ok(others));
        assert_eq!(routed(&switch, Source::Uplink, mac(7), mac(9)), Ok(vec![]));
        let both = vec![Target::Port(a), Target::Port(b)];
        assert_eq!(routed(&switch, Source::Uplink, ALL, mac(9)), Ok(both));
    }
}

#[test]
fn a_source_that_is_not_the_senders_is_refused() {
    let mut switch = Switch::new(true);
    let a = switch.add(mac(1)).unwrap();
    switch.add(mac(2)).unwrap();
    for (from, source) in [
        (Source::Port(a), mac(2)),
        (Source::Port(a), mac(3)),
        (Source::Port(a), ALL),
        (Source::Uplink, mac(1)),
    ] {
        let refused = routed(&switch, from, mac(2), source);
        assert_eq!(refused, Err(Refused::Spoofed(source)), "{from:?}");
    }
}

#[test]
fn an_address_has_one_port_and_a_removed_port_is_free() {
    let mut switch = Switch::new(false);
    let a = switch.add(mac(1)).unwrap();
    assert_eq!(switch.add(mac(1)), Err(SwitchError::Taken(mac(1))));
    assert_eq!(switch.add(ALL), Err(SwitchError::Group(ALL)));
    assert_eq!(switch.add(Mac([0; 6])), Err(SwitchError::Group(Mac([0; 6]))));
    switch.remove(a);
    switch.remove(PortId(77));
    assert!(routed(&switch, Source::Port(a), mac(2), mac(1)).is_err());
    assert_eq!(switch.add(mac(2)), Ok(a), "the number is used again");
    assert!(switch.add(mac(1)).is_ok());
}

#[test]
fn addresses_are_written_in_one_way() {
    assert_eq!(Mac::parse("00:16:3E:00:00:0a"), Some(mac(10)));
    assert_eq!(mac(10).to_string(), "00:16:3e:00:00:0a");
    for bad in ["", "00:16:3e:00:00", "00:16:3e:00:00:1", "00:16:3e:00:00:+1", "0:1:2:3:4:5:6"] {
        assert_eq!(Mac::parse(bad), None, "{bad}");
    }
}

proptest! {
    /// After any changes of ports, no sender receives its own frame, no receiver gets it twice, and only existing ports
    /// get it.
    #[test]
    fn each_receiver_is_there_and_receives_once(
        steps in prop::collection::vec((any::<bool>(), 0_u8..12), 0..60),
        from in 0_u8..12, to in 0_u8..14, uplink in any::<bool>(),
    ) {
        let mut switch = Switch::new(uplink);
        let mut there: Vec<Option<PortId>> = vec![None; 12];
        for (add, i) in steps {
            let slot = &mut there[usize::from(i)];
            match (add, *slot) {
                (true, None) => *slot = Some(switch.add(mac(i)).unwrap()),
                (true, Some(_)) => prop_assert_eq!(switch.add(mac(i)), Err(SwitchError::Taken(mac(i)))),
                (false, Some(port)) => { switch.remove(port); *slot = None; }
                (false, None) => {}
            }
        }
        let dest = if to == 13 { ALL } else { mac(to) };
        let sender = there[usize::from(from)];
        let source = sender.map_or(Source::Uplink, Source::Port);
        let targets = routed(&switch, source, dest, mac(from)).unwrap();
        let others = there.iter().flatten().filter(|port| Some(**port) != sender);
        let outside = uplink && sender.is_some();
        let expected: Vec<Target> = if to == 13 {
            let mut all: Vec<_> = others.copied().map(Target::Port).collect();
            all.extend(outside.then_some(Target::Uplink));
            all
        } else {
            match there.get(usize::from(to)).copied().flatten() {
                Some(port) if Some(port) == sender => vec![],
                Some(port) => vec![Target::Port(port)],
                None => outside.then_some(Target::Uplink).into_iter().collect(),
            }
        };
        let sorted = |mut v: Vec<Target>| { v.sort_by_key(|t| format!("{t:?}")); v };
        prop_assert_eq!(sorted(targets), sorted(expected));
    }

    #[test]
    fn short_frames_are_refused(bytes in prop::collection::vec(any::<u8>(), 0..14)) {
        let refused = Switch::new(true).route(Source::Uplink, &bytes, &mut Vec::new());
        prop_assert_eq!(refused, Err(Refused::Short));
    }
}
