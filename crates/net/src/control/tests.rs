use super::*;

#[test]
fn a_device_goes_through_its_states_and_back() {
    use XenbusState::*;
    let online = |back, front, connected| step(back, front, connected, true);
    assert_eq!(online(Initialising, Initialising, false), Step::Offer);
    assert_eq!(online(InitWait, Initialising, false), Step::Rest);
    assert_eq!(online(InitWait, Connected, false), Step::Connect);
    assert_eq!(online(Connected, Connected, true), Step::Rest);
    assert_eq!(online(Connected, Closing, true), Step::Close);
    assert_eq!(online(Closing, Closing, false), Step::Rest);
    assert_eq!(online(Closing, Closed, false), Step::Finish);
    assert_eq!(online(Closed, Initialising, false), Step::Offer);
    assert_eq!(online(Closed, Closed, false), Step::Rest);
}

#[test]
fn a_successor_connects_what_its_predecessor_had() {
    let (back, front) = (XenbusState::Connected, XenbusState::Connected);
    assert_eq!(step(back, front, false, true), Step::Connect);
}

#[test]
fn a_device_that_is_detached_closes_and_stays_closed() {
    use XenbusState::*;
    assert_eq!(step(Closing, Connected, true, false), Step::Close);
    assert_eq!(step(Closing, Connected, false, false), Step::Rest);
    assert_eq!(step(Closing, Closed, false, false), Step::Finish);
    assert_eq!(step(Closed, Initialising, false, false), Step::Rest);
    assert_eq!(step(Connected, Unknown, true, true), Step::Finish, "the guest is gone");
    assert_eq!(step(Closing, Initialising, false, false), Step::Finish, "no driver in the guest");
}
