//! Texts that say what a disk waits for, for users who ask why it does not come or go.

use ferrite_xen::xenbus::XenbusState;

use crate::directory::Snapshot;
use crate::table::Phase;

/// What the disk waits for. `None`: nothing. `is_full`: requests wait for space.
pub(super) fn waits_for(seen: &Snapshot, phase: Option<&Phase>, is_full: bool) -> Option<String> {
    let waits = waits_besides(seen, phase);
    match (is_full, waits) {
        (false, waits) => waits,
        (true, None) => Some(SPACE.to_owned()),
        (true, Some(waits)) => Some(format!("{waits}; and for {SPACE}")),
    }
}

const SPACE: &str = "space on its storage, which is full: the guest's writes wait \
                     until there is some";

fn waits_besides(seen: &Snapshot, phase: Option<&Phase>) -> Option<String> {
    if !seen.is_there {
        return phase.map(|_| "the toolstack has removed the disk; it is being closed".to_owned());
    }
    if !seen.online {
        return Some(leaving(seen, phase));
    }
    match phase {
        None => Some("the daemon has not looked at it yet".to_owned()),
        Some(Phase::Starting) => Some("its image is being opened".to_owned()),
        Some(Phase::Failed(failure)) => Some(format!("{failure}")),
        Some(Phase::Empty) => None,
        Some(Phase::Served) => coming(seen),
        Some(Phase::Paused) => {
            Some("its end of the pause: the image is closed (ferrite disk resume)".to_owned())
        }
        Some(Phase::Suspended) => {
            Some("its guest, which is suspended: the image is closed until it goes on".to_owned())
        }
        Some(Phase::Resting(later)) => {
            Some(format!("the end of disk {later} of the same VM, which has the image"))
        }
    }
}

fn leaving(seen: &Snapshot, phase: Option<&Phase>) -> String {
    let front = seen.front;
    match (seen.own, front) {
        (XenbusState::Closed, _) => {
            "the toolstack, which has to remove the disk's directories in xenstore".to_owned()
        }
        (_, XenbusState::Initialised | XenbusState::Connected) => format!(
            "the guest, which has not let go of the disk (its driver is in state {front}): \
             unmount it in the guest, or take it away with --force"
        ),
        (_, XenbusState::Closing) => "the guest's driver, which is closing (state 5): a program in the guest \
                   has the disk open"
            .to_owned(),
        _ if let Some(Phase::Failed(failure)) = phase => format!(
            "its image, which has to be opened to write answered data to the medium, and cannot be: \
             {failure}. --force gives these data up"
        ),
        _ => {
            "its image, which is being closed: answered data are written to the medium, at its speed"
                .to_owned()
        }
    }
}

fn coming(seen: &Snapshot) -> Option<String> {
    match (seen.own, seen.front) {
        (XenbusState::Connected, XenbusState::Connected) => None,
        (XenbusState::InitWait, XenbusState::Initialised | XenbusState::Connected)
            if seen.has_script && seen.hotplug_status.as_deref() != Some("connected") =>
        {
            Some("the toolstack's hotplug script, which has not written hotplug-status".to_owned())
        }
        (_, XenbusState::Closing) => {
            Some("the guest's driver, which is closing (state 5)".to_owned())
        }
        (_, XenbusState::Closed) => {
            Some("the guest's driver, which has closed the disk (state 6)".to_owned())
        }
        (_, XenbusState::Unknown) => {
            Some("the guest, whose directory of the disk is gone".to_owned())
        }
        (_, front @ (XenbusState::Initialising | XenbusState::InitWait)) => {
            Some(format!("the guest's driver, which has not connected (state {front})"))
        }
        _ => Some("the connection to the guest, which is being made".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Failure;

    fn seen(own: u32, front: u32, online: bool) -> Snapshot {
        let state = |number: u32| XenbusState::parse(Some(number.to_string().as_bytes()));
        let (own, front) = (state(own), state(front));
        Snapshot { is_there: true, own, front, online, ..Snapshot::default() }
    }

    #[test]
    fn a_disk_that_does_not_close_says_what_it_waits_for() {
        let says = |seen: &Snapshot, word: &str| {
            let said = waits_for(seen, Some(&Phase::Served), false).unwrap();
            assert!(said.contains(word), "{seen:?}: {said}");
        };
        says(&seen(5, 4, false), "unmount");
        says(&seen(5, 3, false), "unmount");
        says(&seen(5, 5, false), "which is closing");
        says(&seen(5, 6, false), "its image");
        says(&seen(5, 0, false), "its image");
        says(&seen(6, 6, false), "the toolstack");
        says(&Snapshot::default(), "it is being closed");
        assert_eq!(waits_for(&Snapshot::default(), None, false), None);
    }

    #[test]
    fn a_disk_that_does_not_come_says_what_it_waits_for() {
        let failure = Failure { why: "no such image".to_owned(), help: "make it".to_owned() };
        let script = Snapshot { has_script: true, ..seen(2, 3, true) };
        let connected = Some("connected".to_owned());
        let plugged = Snapshot { hotplug_status: connected, ..script.clone() };
        for (seen, phase, word) in [
            (seen(1, 1, true), None, "not looked at"),
            (seen(1, 1, true), Some(Phase::Starting), "being opened"),
            (seen(2, 1, true), Some(Phase::Failed(failure)), "no such image; make it"),
            (script, Some(Phase::Served), "hotplug script"),
            (plugged, Some(Phase::Served), "being made"),
            (seen(2, 1, true), Some(Phase::Served), "has not connected (state 1)"),
            (seen(5, 5, true), Some(Phase::Served), "closing"),
            (seen(6, 6, true), Some(Phase::Served), "has closed"),
            (seen(4, 0, true), Some(Phase::Served), "is gone"),
        ] {
            let said = waits_for(&seen, phase.as_ref(), false).unwrap();
            assert!(said.contains(word), "{seen:?}: {said}");
        }
        assert_eq!(waits_for(&seen(4, 4, true), Some(&Phase::Served), false), None);
        assert_eq!(waits_for(&seen(2, 1, true), Some(&Phase::Empty), false), None);
    }

    #[test]
    fn a_disk_that_waits_for_space_says_so_with_what_else_it_waits_for() {
        let says = |seen: &Snapshot| waits_for(seen, Some(&Phase::Served), true).unwrap();
        assert!(says(&seen(4, 4, true)).starts_with("space on its storage"));
        let leaving = says(&seen(5, 4, false));
        assert!(
            leaving.starts_with("the guest") && leaving.contains("; and for space"),
            "{leaving}"
        );
    }
}
