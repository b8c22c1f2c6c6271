//! Whether a disk's LUN is reserved for this host.

use std::fmt;
use std::path::Path;
use std::str::FromStr;

use ferrite_host::fence::Terms;

/// The setting `fence`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fencing {
    /// It is not.
    #[default]
    None,
    /// It is, and a LUN whose target forgets reservations when it starts again is refused.
    Reservation,
    /// It is, and such a LUN is taken.
    WeakReservation,
}

impl Fencing {
    /// The terms, with the folder of this host's records. `None`: it is not reserved.
    pub fn terms(self, records: &Path) -> Option<Terms> {
        let weak = match self {
            Fencing::None => return None,
            Fencing::Reservation => false,
            Fencing::WeakReservation => true,
        };
        Some(Terms { weak, records: records.to_owned() })
    }
}

impl fmt::Display for Fencing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Fencing::None => "none",
            Fencing::Reservation => "reservation",
            Fencing::WeakReservation => "weak-reservation",
        })
    }
}

impl FromStr for Fencing {
    type Err = String;

    fn from_str(text: &str) -> Result<Fencing, String> {
        let all = [Fencing::None, Fencing::Reservation, Fencing::WeakReservation];
        let found = all.into_iter().find(|fencing| fencing.to_string() == text);
        found.ok_or_else(|| {
            format!(
                "{text:?} is no way to reserve a LUN; use none, reservation or weak-reservation"
            )
        })
    }
}
