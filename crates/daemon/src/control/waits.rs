//! What a disk waits for, in words for whoever asks why it does not come or go.

use crate::directory::Look;
use crate::table::Phase;

/// `None`: nothing. `is_full`: requests wait for space.
pub(super) fn waits_for(look: &Look, phase: Option<&Phase>, is_full: bool) -> Option<String> {
    let waits = waits_besides(look, phase);
    match (is_full, waits) {
        (false, waits) => waits,
        (true, None) => Some(SPACE.to_owned()),
        (true, Some(waits)) => Some(format!("{waits}; and for {SPACE}")),
    }
}

const SPACE: &str = "space on its storage, which is full: what the guest writes is not answered \
                     until there is some";

fn waits_besides(look: &Look, phase: Option<&Phase>) -> Option<String> {
    if !look.is_there {
        return phase.map(|_| "the toolstack has removed the disk; it is being closed".to_owned());
    }
    if !look.online {
        return Some(leaving(look, phase));
    }
    match phase {
        None => Some("the daemon has not looked at it yet".to_owned()),
        Some(Phase::Starting) => Some("its image is being opened".to_owned()),
        Some(Phase::Failed(failure)) => Some(format!("{failure}")),
        Some(Phase::Empty) => None,
        Some(Phase::Served) => coming(look),
        Some(Phase::Resting(later)) => {
            Some(format!("the end of disk {later}, which has the image: it is the same VM's"))
        }
    }
}

fn leaving(look: &Look, phase: Option<&Phase>) -> String {
    let front = look.front;
    match (look.own, front) {
        (6, _) => {
            "the toolstack, which has to remove the disk's directories in xenstore".to_owned()
        }
        (_, 3 | 4) => format!(
            "the guest, which has not let go of the disk (its driver is in state {front}): \
             unmount it in the guest, or take it away with --force"
        ),
        (_, 5) => "the guest's driver, which is closing (state 5): it waits for who has the disk \
                   open in the guest"
            .to_owned(),
        _ if let Some(Phase::Failed(failure)) = phase => format!(
            "its image, which has to be opened to bring what was answered to the medium, and cannot \
             be: {failure}. --force gives that up"
        ),
        _ => {
            "its image, which is being closed: what was answered is written to the medium, as fast \
              as that takes it"
                .to_owned()
        }
    }
}

fn coming(look: &Look) -> Option<String> {
    match (look.own, look.front) {
        (4, 4) => None,
        (2, 3 | 4) if look.has_script && look.hotplug_status.as_deref() != Some("connected") => {
            Some("the toolstack's hotplug script, which has not written hotplug-status".to_owned())
        }
        (_, 5) => Some("the guest's driver, which is closing (state 5)".to_owned()),
        (_, 6) => Some("the guest's driver, which has closed the disk (state 6)".to_owned()),
        (_, 0) => Some("the guest, whose directory of the disk is gone".to_owned()),
        (_, front @ (1 | 2)) => {
            Some(format!("the guest's driver, which has not connected (state {front})"))
        }
        _ => Some("the connection to the guest, which is being made".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Failure;

    fn look(own: u32, front: u32, online: bool) -> Look {
        Look { is_there: true, own, front, online, ..Look::default() }
    }

    #[test]
    fn a_disk_that_does_not_close_says_what_it_waits_for() {
        let says = |look: &Look, word: &str| {
            let said = waits_for(look, Some(&Phase::Served), false).unwrap();
            assert!(said.contains(word), "{look:?}: {said}");
        };
        says(&look(5, 4, false), "unmount");
        says(&look(5, 3, false), "unmount");
        says(&look(5, 5, false), "which is closing");
        says(&look(5, 6, false), "its image");
        says(&look(5, 0, false), "its image");
        says(&look(6, 6, false), "the toolstack");
        says(&Look::default(), "it is being closed");
        assert_eq!(waits_for(&Look::default(), None, false), None);
    }

    #[test]
    fn a_disk_that_does_not_come_says_what_it_waits_for() {
        let failure = Failure { why: "no such image".to_owned(), help: "make it".to_owned() };
        let script = Look { has_script: true, ..look(2, 3, true) };
        let connected = Some("connected".to_owned());
        let plugged = Look { hotplug_status: connected, ..script.clone() };
        for (look, phase, word) in [
            (look(1, 1, true), None, "not looked at"),
            (look(1, 1, true), Some(Phase::Starting), "being opened"),
            (look(2, 1, true), Some(Phase::Failed(failure)), "no such image; make it"),
            (script, Some(Phase::Served), "hotplug script"),
            (plugged, Some(Phase::Served), "being made"),
            (look(2, 1, true), Some(Phase::Served), "has not connected (state 1)"),
            (look(5, 5, true), Some(Phase::Served), "closing"),
            (look(6, 6, true), Some(Phase::Served), "has closed"),
            (look(4, 0, true), Some(Phase::Served), "is gone"),
        ] {
            let said = waits_for(&look, phase.as_ref(), false).unwrap();
            assert!(said.contains(word), "{look:?}: {said}");
        }
        assert_eq!(waits_for(&look(4, 4, true), Some(&Phase::Served), false), None);
        assert_eq!(waits_for(&look(2, 1, true), Some(&Phase::Empty), false), None);
    }

    #[test]
    fn a_disk_that_waits_for_space_says_so_with_what_else_it_waits_for() {
        let says = |look: &Look| waits_for(look, Some(&Phase::Served), true).unwrap();
        assert!(says(&look(4, 4, true)).starts_with("space on its storage"));
        let leaving = says(&look(5, 4, false));
        assert!(
            leaving.starts_with("the guest") && leaving.contains("; and for space"),
            "{leaving}"
        );
    }
}
