//! Which ports a frame goes to. Pure: no I/O, no clock.
//!
//! A port has one fixed address, and nothing is learned. A frame whose source is not its port's address is refused.

use std::collections::BTreeMap;
use std::fmt;

/// An Ethernet address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Mac(pub [u8; 6]);

impl Mac {
    /// From `xx:xx:xx:xx:xx:xx`.
    pub fn parse(text: &str) -> Option<Mac> {
        let mut bytes = [0; 6];
        let mut parts = text.split(':');
        for byte in &mut bytes {
            let part = parts.next().filter(|part| part.len() == 2)?;
            if !part.bytes().all(|digit| digit.is_ascii_hexdigit()) {
                return None;
            }
            *byte = u8::from_str_radix(part, 16).ok()?;
        }
        parts.next().is_none().then_some(Mac(bytes))
    }

    /// Numbers are compared in one step.
    fn number(self) -> u64 {
        let [a, b, c, d, e, f] = self.0;
        u64::from_be_bytes([0, 0, a, b, c, d, e, f])
    }

    /// Broadcast or multicast.
    pub fn is_group(self) -> bool {
        self.0[0] & 1 != 0
    }
}

impl fmt::Display for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

/// A port of a switch; numbers are used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PortId(pub u16);

/// The sender of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// A guest.
    Port(PortId),
    /// The network outside.
    Uplink,
}

/// The receiver of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// A guest.
    Port(PortId),
    /// The network outside.
    Uplink,
}

/// Why a frame is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// It has no Ethernet header.
    #[error("the frame has no Ethernet header")]
    Short,
    /// Its source is not its port's address, or is a port's and comes from outside.
    #[error("the frame's source {0} is not the sender's")]
    Spoofed(Mac),
}

/// Why a port cannot be added.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SwitchError {
    /// Another port has the address.
    #[error("another interface has the address {0}; give each its own mac")]
    Taken(Mac),
    /// It is no address of one interface.
    #[error("{0} is an address of a group or all zeros; choose another mac")]
    Group(Mac),
    /// There are 65,536 ports.
    #[error("the switch has no port left")]
    Full,
}

/// The ports.
#[derive(Debug, Default)]
pub struct Switch {
    uplink: bool,
    ports: Vec<Option<Mac>>,
    /// By the addresses as [numbers](Mac::number).
    by_mac: BTreeMap<u64, PortId>,
}

impl Switch {
    /// Without ports.
    pub fn new(uplink: bool) -> Switch {
        Switch { uplink, ..Switch::default() }
    }

    /// A port for this address.
    ///
    /// # Errors
    /// [`SwitchError`].
    pub fn add(&mut self, mac: Mac) -> Result<PortId, SwitchError> {
        if mac.is_group() || mac == Mac([0; 6]) {
            return Err(SwitchError::Group(mac));
        }
        if self.by_mac.contains_key(&mac.number()) {
            return Err(SwitchError::Taken(mac));
        }
        let free = self.ports.iter().position(Option::is_none).unwrap_or(self.ports.len());
        let port = PortId(u16::try_from(free).map_err(|_| SwitchError::Full)?);
        if free == self.ports.len() {
            self.ports.push(None);
        }
        self.ports[free] = Some(mac);
        self.by_mac.insert(mac.number(), port);
        Ok(port)
    }

    /// Removes a port, if it is there.
    pub fn remove(&mut self, port: PortId) {
        if let Some(mac) = self.ports.get_mut(usize::from(port.0)).and_then(Option::take) {
            self.by_mac.remove(&mac.number());
        }
    }

    /// Fills `to` with the receivers of a frame that begins with these bytes: none, one, or all others.
    ///
    /// # Errors
    /// The frame is refused.
    pub fn route(&self, from: Source, frame: &[u8], to: &mut Vec<Target>) -> Result<(), Refused> {
        to.clear();
        let (dest, rest) = frame.split_first_chunk::<6>().ok_or(Refused::Short)?;
        let (source, rest) = rest.split_first_chunk::<6>().ok_or(Refused::Short)?;
        let (dest, source) = (Mac(*dest), Mac(*source));
        if rest.len() < 2 {
            return Err(Refused::Short);
        }
        let own = self.by_mac.get(&source.number()).copied();
        let is_own = match from {
            Source::Port(port) => own == Some(port),
            Source::Uplink => own.is_none(),
        };
        if !is_own {
            return Err(Refused::Spoofed(source));
        }
        let outside = self.uplink && from != Source::Uplink;
        if dest.is_group() {
            let ports = (0..).zip(&self.ports).filter(|(_, mac)| mac.is_some());
            let others = ports.map(|(i, _)| PortId(i)).filter(|p| from != Source::Port(*p));
            to.extend(others.map(Target::Port));
            to.extend(outside.then_some(Target::Uplink));
            return Ok(());
        }
        match self.by_mac.get(&dest.number()) {
            Some(port) if from == Source::Port(*port) => {}
            Some(port) => to.push(Target::Port(*port)),
            None => to.extend(outside.then_some(Target::Uplink)),
        }
        Ok(())
    }
}
