//! The keys of an interface in xenstore: what this backend offers, and what a frontend asks for.

use std::sync::Arc;

use ferrite_xen::hypervisor::{DomId, GrantRef, Hypervisor};
use ferrite_xen::mover::Moving;
use ferrite_xen::net::NetRings;
use ferrite_xen::store::{Store, StoreError};

use crate::VifId;
use crate::counters::Counters;
use crate::switch::Mac;
use crate::vif::{Connection, Features};

/// Says what this backend can do.
pub(super) fn offer(store: &mut Store, backend: &str, queues: u32) -> Result<(), StoreError> {
    let queues = queues.to_string();
    let keys = [
        ("feature-sg", "1"),
        ("feature-gso-tcpv4", "1"),
        ("feature-gso-tcpv6", "1"),
        ("feature-ipv6-csum-offload", "1"),
        ("feature-rx-copy", "1"),
        ("feature-rx-flip", "0"),
        ("multi-queue-max-queues", &queues),
    ];
    for (key, value) in keys {
        store.write(&format!("{backend}/{key}"), value.as_bytes())?;
    }
    Ok(())
}

/// The keys of a frontend.
pub(super) struct Keys {
    mac: Mac,
    features: Features,
    /// The transmit ring, the receive ring, the event channel of each queue.
    queues: Vec<(u32, u32, u32)>,
}

/// Reads the keys of both sides. The inner error is the reason in words.
pub(super) fn read(
    store: &mut Store,
    id: VifId,
    backend: &str,
    frontend: &str,
    most: u32,
) -> Result<Result<Keys, String>, StoreError> {
    let mut number = |path: String| -> Result<Option<u32>, StoreError> {
        let value = store.read(&path)?;
        let text = value.as_deref().and_then(|value| std::str::from_utf8(value).ok());
        Ok(text.and_then(|text| text.trim().parse().ok()))
    };
    if number(format!("{backend}/frontend-id"))? != Some(u32::from(id.domid)) {
        return Ok(Err(format!("{backend}/frontend-id is not {}; attach it again", id.domid)));
    }
    let mut flag = |key: &str| Ok::<_, StoreError>(number(format!("{frontend}/{key}"))? == Some(1));
    if !flag("request-rx-copy")? {
        return Ok(Err("the frontend does not take copies (request-rx-copy)".into()));
    }
    let features = Features {
        sg: flag("feature-sg")?,
        gso_tcp4: flag("feature-gso-tcpv4")?,
        gso_tcp6: flag("feature-gso-tcpv6")?,
    };
    let asked = store.read(&format!("{frontend}/multi-queue-num-queues"))?;
    let text = asked.as_deref().map(String::from_utf8_lossy);
    let count = text.as_ref().map_or(Some(1), |text| text.trim().parse().ok());
    let Some(count) = count.filter(|count| (1..=most).contains(count)) else {
        let asked = text.unwrap_or_default();
        return Ok(Err(format!("the frontend asks for {asked:?} queues; 1 to {most} are offered")));
    };
    let mut queues = Vec::new();
    for i in 0..count {
        let at = match text {
            Some(_) if count > 1 => format!("{frontend}/queue-{i}"),
            _ => frontend.to_owned(),
        };
        let mut values = [0; 3];
        for (to, key) in values.iter_mut().zip(["tx-ring-ref", "rx-ring-ref", "event-channel"]) {
            let value = store.read(&format!("{at}/{key}"))?;
            let value = value.as_deref().and_then(|value| std::str::from_utf8(value).ok());
            let Some(value) = value.and_then(|value| value.trim().parse().ok()) else {
                return Ok(Err(format!("the frontend's {at}/{key} is missing or no number")));
            };
            *to = value;
        }
        queues.push((values[0], values[1], values[2]));
    }
    let mac = store.read_string(&format!("{backend}/mac"))?;
    let Some(mac) = mac.as_deref().and_then(Mac::parse) else {
        return Ok(Err(format!("{backend}/mac is {mac:?}; it has to be xx:xx:xx:xx:xx:xx")));
    };
    Ok(Ok(Keys { mac, features, queues }))
}

impl Keys {
    /// The interface's address.
    pub(super) fn mac(&self) -> Mac {
        self.mac
    }

    /// Maps all rings and binds all channels, or none. The error is the reason in words.
    pub(super) fn connect(
        self,
        id: VifId,
        hypervisor: &dyn Hypervisor,
        counters: Arc<Counters>,
    ) -> Result<Connection, String> {
        let Keys { mac, features, queues: references } = self;
        let mut queues = Vec::with_capacity(references.len());
        for (tx, rx, port) in references {
            let rings = [GrantRef(tx), GrantRef(rx)];
            let link = hypervisor.connect(DomId(id.domid), &rings, port, &Moving::copy());
            let link = link.map_err(|e| e.to_string())?;
            queues.push(NetRings::attach(link).map_err(|e| e.to_string())?);
        }
        Ok(Connection { id, mac, features, queues, counters })
    }
}
