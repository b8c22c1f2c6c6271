//! Cylinders, heads and sectors, by the appendix of the specification. They give the size of a disk only roughly; its
//! `current size` counts.

/// The largest number of sectors that a geometry can express.
pub(crate) const MAX_SECTORS: u64 = 65535 * 16 * 255;

/// A disk's geometry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Cylinders.
    pub cylinders: u16,
    /// Heads, or tracks of a cylinder.
    pub heads: u8,
    /// Sectors of a track.
    pub sectors: u8,
}

impl Geometry {
    /// The geometry of a disk with so many sectors; those beyond [`MAX_SECTORS`] are not counted.
    pub(crate) fn of_sectors(total: u64) -> Geometry {
        let total = total.min(MAX_SECTORS);
        let (heads, sectors);
        if total >= 65535 * 16 * 63 {
            (heads, sectors) = (16, 255);
        } else {
            let tracks = total / 17;
            let wanted = tracks.div_ceil(1024).max(4);
            if tracks < wanted * 1024 && wanted <= 16 {
                (heads, sectors) = (wanted, 17);
            } else if total / 31 < 16 * 1024 {
                (heads, sectors) = (16, 31);
            } else {
                (heads, sectors) = (16, 63);
            }
        }
        let cylinders = total / sectors / heads;
        // At most 65535, 16 and 255 by the arithmetic above.
        Geometry { cylinders: cylinders as u16, heads: heads as u8, sectors: sectors as u8 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn geometries_are_those_of_the_specification() {
        // Size in sectors, then the geometry that other implementations write for it.
        for (sectors, expect) in [
            (1, (0, 4, 17)),
            (4096, (60, 4, 17)),
            (4 << 20, (4161, 16, 63)),
            (65535 * 16 * 63 - 1, (65534, 16, 63)),
            (65535 * 16 * 63, (16191, 16, 255)),
            (MAX_SECTORS, (65535, 16, 255)),
            (u64::MAX, (65535, 16, 255)),
        ] {
            let g = Geometry::of_sectors(sectors);
            assert_eq!((g.cylinders, g.heads, g.sectors), expect, "{sectors}");
        }
    }

    #[test]
    fn a_geometry_never_says_more_than_the_disk_has_and_misses_less_than_a_cylinder_and_a_track() {
        let mut sectors = 1u64;
        while sectors < MAX_SECTORS {
            let g = Geometry::of_sectors(sectors);
            let cylinder = u64::from(g.heads) * u64::from(g.sectors);
            let said = u64::from(g.cylinders) * cylinder;
            assert!(said <= sectors);
            assert!(sectors - said < cylinder + u64::from(g.sectors), "{sectors}");
            sectors = sectors * 9 / 8 + 1;
        }
    }
}
