//! VHDs of ours in other programs, and theirs here.

use std::fs;
use std::hash::{DefaultHasher, Hasher};
use std::os::unix::fs::FileExt;
use std::path::Path;

use ferrite_disk::ImageName;
use ferrite_image_tools::Convert;
use ferrite_images::vhd::NewImage;
use ferrite_testkit::bytes::first_difference;

use crate::common::vhd::{at, check_by_vhd_util, create, create_sparse, name, parent, peer, queue};
use crate::common::{MIB, Queue, dir_on_disk, skipped, work};
use rustix::fs::{SeekFrom, seek};

/// Sizes of disks, each of which a peer takes for exactly this size.
const SIZES: [u64; 7] = [
    512,
    2 * MIB - 512,
    2 * MIB,
    2 * MIB + 512,
    // The last that a geometry can say, and one more.
    65535 * 16 * 255 * 512,
    65535 * 16 * 255 * 512 + 512,
    2040 << 30,
];

/// Places worth writing to in a disk: the beginning, around a block's border, the end.
fn places(bytes: u64) -> Vec<(u64, Vec<u8>)> {
    let pattern = |seed: u64, len: u64| {
        (0..len).map(|i| ((i * 31 + seed * 7 + i / 512) % 251) as u8 + 1).collect::<Vec<u8>>()
    };
    let mut places = vec![(0, pattern(1, 512.min(bytes)))];
    for border in [2 * MIB, bytes / 2 / (2 * MIB) * (2 * MIB)] {
        if border >= 4096 && border + 4096 <= bytes {
            places.push((border - 4096, pattern(border / 512, 8192)));
        }
    }
    if bytes > 8192 {
        places.push((bytes - 3584, pattern(9, 3584)));
    }
    places
}

fn write_places(path: &Path, bytes: u64) {
    let mut disk = queue(path);
    assert_eq!(disk.disk.sectors() * 512, bytes);
    for (offset, data) in places(bytes) {
        disk.write(offset, &data).unwrap();
    }
    disk.close().unwrap();
}

/// A raw file with the same contents.
fn raw_model(path: &Path, bytes: u64) {
    let file = fs::File::create_new(path).unwrap();
    file.set_len(bytes).unwrap();
    for (offset, data) in places(bytes) {
        file.write_all_at(&data, offset).unwrap();
    }
}

fn check_places(path: &Path, bytes: u64) {
    let mut disk = queue(path);
    assert_eq!(disk.disk.sectors() * 512, bytes, "{}", path.display());
    for (offset, data) in places(bytes) {
        let found = disk.read(offset, data.len()).unwrap();
        assert!(found == data, "{} at {offset}", path.display());
    }
}

/// The hash of what a raw file holds and where, zeros left out: files that differ in nothing but
/// trailing zeros have the same. Holes are not read.
fn hash(path: &Path) -> u64 {
    let file = fs::File::open(path).unwrap();
    let mut hasher = DefaultHasher::new();
    let mut page = [0; 4096];
    let mut at = 0;
    while let Ok(data) = seek(&file, SeekFrom::Data(at)) {
        let hole = seek(&file, SeekFrom::Hole(data)).unwrap();
        at = data / 4096 * 4096;
        while at < hole {
            page.fill(0);
            // The last page may be a part of one.
            read_at(&file, &mut page, at);
            if page.iter().any(|byte| *byte != 0) {
                hasher.write_u64(at);
                hasher.write(&page);
            }
            at += 4096;
        }
    }
    hasher.finish()
}

fn read_at(file: &fs::File, page: &mut [u8], at: u64) {
    let mut got = 0;
    while got < page.len() {
        match file.read_at(&mut page[got..], at + got as u64).unwrap() {
            0 => break,
            n => got += n,
        }
    }
}

/// The hash of what QEMU reads from a VHD; none: there is no QEMU.
fn hash_by_qemu(image: &Path) -> Option<u64> {
    let raw = image.with_extension("by-qemu");
    peer("qemu-img", &["convert", "-f", "vpc", "-O", "raw", name(image), name(&raw)])?;
    let hash = hash(&raw);
    fs::remove_file(raw).unwrap();
    Some(hash)
}

/// And of what we read.
fn hash_by_us(image: &Path) -> u64 {
    let raw = image.with_extension("by-us");
    let named = |format: &str, path| ImageName::parse(&format!("{format}:{}", name(path))).unwrap();
    let (from, to) = (named("vhd", image), named("raw", &raw));
    work(None, |tools| tools.convert(&from, &to, &Convert::default())).unwrap();
    let hash = hash(&raw);
    fs::remove_file(raw).unwrap();
    hash
}

#[test]
fn qemu_reads_what_was_written_to_ours() {
    for bytes in SIZES {
        for fixed in [false, true] {
            let dir = dir_on_disk();
            let (ours, raw) = (at(&dir, "ours.vhd"), at(&dir, "model.raw"));
            let new = NewImage { fixed, ..NewImage::dynamic(bytes) };
            match fixed {
                true => create_sparse(&ours, &new).unwrap(),
                false => create(&ours, &new).unwrap(),
            };
            write_places(&ours, bytes);
            check_places(&ours, bytes);
            // It knows whole blocks only.
            if bytes % (2 * MIB) == 0 {
                check_by_vhd_util(&ours);
            }
            raw_model(&raw, bytes);
            let Some(theirs) = hash_by_qemu(&ours) else { return };
            assert_eq!(theirs, hash(&raw), "{bytes} bytes, fixed: {fixed}");
            assert_eq!(hash_by_us(&ours), theirs, "{bytes} bytes, fixed: {fixed}");
            let args = ["compare", "-f", "vpc", "-F", "raw", name(&ours), name(&raw)];
            let said = peer("qemu-img", &args).unwrap();
            assert!(said.contains("identical"), "{bytes} bytes, fixed: {fixed}: {said}");
        }
    }
}

/// Has QEMU make a VHD of a raw file; false: there is no QEMU.
fn convert_by_qemu(raw: &Path, options: &str, to: &Path) -> bool {
    let args = ["convert", "-f", "raw", "-O", "vpc", "-o", options, name(raw), name(to)];
    peer("qemu-img", &args).is_some()
}

#[test]
fn ours_reads_what_qemu_wrote() {
    for bytes in SIZES {
        for subformat in ["dynamic", "fixed"] {
            let dir = dir_on_disk();
            let (theirs, raw) = (at(&dir, "theirs.vhd"), at(&dir, "model.raw"));
            raw_model(&raw, bytes);
            let options = format!("subformat={subformat},force_size=on");
            if !convert_by_qemu(&raw, &options, &theirs) {
                return;
            }
            check_places(&theirs, bytes);
            assert_eq!(hash_by_us(&theirs), hash(&raw), "{bytes} bytes, {subformat}");
            // And what we change, QEMU sees.
            let mut disk = queue(&theirs);
            disk.write(0, &[0xA5; 512]).unwrap();
            disk.close().unwrap();
            drop(disk);
            let file = fs::File::options().write(true).open(&raw).unwrap();
            file.write_all_at(&[0xA5; 512], 0).unwrap();
            assert_eq!(hash_by_qemu(&theirs), Some(hash(&raw)), "{bytes} bytes, {subformat}");
        }
    }
}

/// Without `force_size` QEMU makes a disk as large as the next geometry says, and believes the
/// geometry when it opens it. We have to see the same size.
#[test]
fn ours_reads_what_qemu_made_by_geometry() {
    for bytes in SIZES {
        for subformat in ["dynamic", "fixed"] {
            let dir = dir_on_disk();
            let (theirs, raw) = (at(&dir, "theirs.vhd"), at(&dir, "model.raw"));
            raw_model(&raw, bytes);
            if !convert_by_qemu(&raw, &format!("subformat={subformat}"), &theirs) {
                return;
            }
            let args = ["info", "-f", "vpc", "--output=json", name(&theirs)];
            let info = peer("qemu-img", &args).unwrap();
            let info: serde_json::Value = serde_json::from_str(&info).unwrap();
            let seen = queue(&theirs).disk.sectors() * 512;
            assert_eq!(info["virtual-size"], seen, "{bytes} bytes, {subformat}");
            assert!(seen >= bytes, "{bytes} bytes, {subformat}: {seen}");
            assert_eq!(hash_by_us(&theirs), hash(&raw), "{bytes} bytes, {subformat}");
        }
    }
}

#[test]
fn a_chain_reads_the_youngest_data() {
    let dir = dir_on_disk();
    let (base, middle, leaf) = (at(&dir, "base.vhd"), at(&dir, "middle.vhd"), at(&dir, "leaf.vhd"));
    let first = create(&base, &NewImage::dynamic(6 * MIB)).unwrap();
    let mut disk = queue(&base);
    disk.write(0, &[1; 8192]).unwrap();
    disk.write(3 * MIB, &[1; 8192]).unwrap();
    disk.close().unwrap();
    drop(disk);
    let second = create(&middle, &NewImage::differencing(6 * MIB, parent(&base, &first))).unwrap();
    let mut disk = queue(&middle);
    disk.write(4096, &[2; 512]).unwrap();
    disk.close().unwrap();
    drop(disk);
    create(&leaf, &NewImage::differencing(6 * MIB, parent(&middle, &second))).unwrap();
    let before = fs::read(&base).unwrap();
    let mut disk = queue(&leaf);
    disk.write(3 * MIB + 512, &[3; 512]).unwrap();
    let read = |disk: &mut Queue, at: u64| disk.read(at, 512).unwrap()[0];
    for round in 0..2 {
        assert_eq!(read(&mut disk, 0), 1, "{round}");
        assert_eq!(read(&mut disk, 4096), 2);
        assert_eq!(read(&mut disk, 4608), 1);
        assert_eq!(read(&mut disk, 3 * MIB), 1);
        assert_eq!(read(&mut disk, 3 * MIB + 512), 3);
        assert_eq!(read(&mut disk, 5 * MIB), 0);
        disk.close().unwrap();
        drop(disk);
        disk = queue(&leaf);
    }
    drop(disk);
    assert!(fs::read(&base).unwrap() == before);
    check_by_vhd_util(&leaf);
    let Some(said) = peer("vhdiinfo", &[name(&leaf)]) else { return };
    assert!(said.contains(&second.uuid.to_string()), "{said}");
    assert!(said.contains("middle.vhd"), "{said}");
}

#[test]
fn qemu_writes_to_ours() {
    let dir = dir_on_disk();
    let path = at(&dir, "ours.vhd");
    create(&path, &NewImage::dynamic(20 * MIB)).unwrap();
    // QEMU does not know the batmap, and puts its first block there.
    for (pattern, offset) in [(7, "1M"), (8, "19M")] {
        let write = format!("write -P {pattern} {offset} 64k");
        if peer("qemu-io", &["-f", "vpc", "-c", &write, name(&path)]).is_none() {
            return;
        }
    }
    for round in 0..2 {
        let mut disk = queue(&path);
        assert_eq!(disk.read(MIB, 65536).unwrap(), [7; 65536], "{round}");
        assert_eq!(disk.read(19 * MIB, 65536).unwrap(), [8; 65536]);
        assert_eq!(disk.read(0, 65536).unwrap(), [0; 65536]);
        disk.write(8 * MIB, &[9; 4096]).unwrap();
        disk.close().unwrap();
    }
    let read = ["read -P 7 1M 64k", "read -P 8 19M 64k", "read -P 9 8M 4k", "read -P 0 0 64k"];
    for read in read {
        let said = peer("qemu-io", &["-r", "-f", "vpc", "-c", read, name(&path)]).unwrap();
        assert!(!said.contains("failed"), "{read}: {said}");
    }
}

/// A chain mounted by libvhdi, as long as it lives.
struct Mounted(std::path::PathBuf);

impl Drop for Mounted {
    fn drop(&mut self) {
        crate::common::run("umount", &[name(&self.0)]);
    }
}

#[test]
fn libvhdi_reads_a_chain_of_ours() {
    let dir = dir_on_disk();
    const BYTES: u64 = 8 * MIB;
    let (base, leaf, mount) = (at(&dir, "base.vhd"), at(&dir, "leaf.vhd"), at(&dir, "mnt"));
    let footer = create(&base, &NewImage::dynamic(BYTES)).unwrap();
    let mut disk = queue(&base);
    for at in (0..BYTES).step_by(65536 * 3) {
        disk.write(at, &vec![(at >> 16) as u8 + 1; 65536]).unwrap();
    }
    disk.close().unwrap();
    drop(disk);
    create(&leaf, &NewImage::differencing(BYTES, parent(&base, &footer))).unwrap();
    let mut disk = queue(&leaf);
    // In units of 4 KiB: where a byte of a bitmap says "some", libvhdi 20210425 takes the rest of
    // its sectors for zeros, whatever the parent has.
    for at in (4096..BYTES).step_by(12 * 4096) {
        disk.write(at, &[0xF0 + (at / 4096 % 7) as u8; 4096]).unwrap();
    }
    disk.close().unwrap();
    let mut ours = Vec::new();
    for at in (0..BYTES).step_by(MIB as usize) {
        ours.extend(disk.read(at, MIB as usize).unwrap());
    }
    drop(disk);
    fs::create_dir(&mount).unwrap();
    if !Path::new("/dev/fuse").exists() {
        return skipped("there is no FUSE here");
    }
    if peer("vhdimount", &[name(&leaf), name(&mount)]).is_none() {
        return;
    }
    let mounted = Mounted(mount);
    // The numbers count from the base.
    let theirs = fs::read(mounted.0.join("vhdi2")).unwrap();
    assert_eq!(theirs.len(), ours.len());
    let differs = first_difference(&theirs, &ours);
    assert_eq!(differs, None, "byte {differs:?}");
}
