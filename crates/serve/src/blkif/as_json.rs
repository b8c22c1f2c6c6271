//! The JSON forms of other crates' types in messages between processes.

use serde::{Deserialize as _, Deserializer, Serialize as _, Serializer, de};

/// A slot layout as its key in xenstore.
pub(super) mod protocol {
    use ferrite_xen::abi::Protocol;

    use super::*;

    pub(crate) fn serialize<S: Serializer>(value: &Protocol, to: S) -> Result<S::Ok, S::Error> {
        value.key().serialize(to)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Protocol, D::Error> {
        let key = String::deserialize(from)?;
        Protocol::from_key(Some(&key)).ok_or_else(|| de::Error::custom("no such layout"))
    }
}

/// Grant references as their numbers.
pub(super) mod grants {
    use ferrite_xen::hypervisor::GrantRef;

    use super::*;

    pub(crate) fn serialize<S: Serializer>(value: &[GrantRef], to: S) -> Result<S::Ok, S::Error> {
        to.collect_seq(value.iter().map(|grant| grant.0))
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Vec<GrantRef>, D::Error> {
        Ok(Vec::<u32>::deserialize(from)?.into_iter().map(GrantRef).collect())
    }
}

/// Discard limits as granularity and alignment in bytes.
pub(super) mod discard {
    use ferrite_disk::DiscardLimits;

    use super::*;

    pub(crate) fn serialize<S: Serializer>(
        value: &Option<DiscardLimits>,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        value.map(|limits| (limits.granularity_bytes, limits.alignment_bytes)).serialize(to)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Option<DiscardLimits>, D::Error> {
        let limits = Option::<(u32, u32)>::deserialize(from)?;
        Ok(limits.map(|(granularity_bytes, alignment_bytes)| DiscardLimits {
            granularity_bytes,
            alignment_bytes,
        }))
    }
}
