//! The settings that can change while a disk is served.

use serde::{Deserialize, Serialize};

use crate::counters::Counters;
use crate::path::device::Device;
use crate::path::full::OnFull;
use crate::path::limit::Limits;
use crate::polling::PollWindow;
use crate::processors::Processors;

/// The settings of a running disk. A setting that is `None` was not set: it is as the worker's options say.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tune {
    /// The limits of requests and bytes in a second.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub limits: Option<Limits>,
    /// The policy for requests that find no space.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub on_full: Option<OnFull>,
    /// How long queues poll before they sleep.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub poll_us: Option<PollWindow>,
    /// The limit of processor time, in percent of one processor; 0 for none.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub cpu: Option<u32>,
}

impl Tune {
    /// Whether nothing was set.
    pub fn is_empty(&self) -> bool {
        *self == Tune::default()
    }

    /// These settings with those of `later` in their place.
    #[must_use]
    pub fn then(&self, later: &Tune) -> Tune {
        Tune {
            limits: later.limits.or(self.limits),
            on_full: later.on_full.or(self.on_full),
            poll_us: later.poll_us.or(self.poll_us),
            cpu: later.cpu.or(self.cpu),
        }
    }

    /// Sets all of it on a disk that is served. The counters' file tells readers of the limits.
    pub(super) fn apply(&self, device: &Device, processors: &Processors, counters: &Counters) {
        if let Some(limits) = &self.limits {
            device.set_limits(limits);
            counters.limit(limits);
            tracing::info!("the disk's limits are now: {limits}");
        }
        if let Some(on_full) = self.on_full {
            device.set_on_full(on_full);
        }
        if let Some(window) = self.poll_us {
            processors.set_window(window);
        }
        if let Some(percent) = self.cpu {
            processors.set_limit(percent, &device.clock);
        }
        device.wake_all();
    }
}
