#!/usr/bin/env bash
# Finding: imago takes the mark "raw" from a qcow2 whose data file is raw, when it opens it for writing, without a word.
# Versions: imago 0.2.6 (crates.io, pinned below), qemu-img 7.2 made the image.
# Seen: after an opening for writing the image says `data file raw: false`; zeros that are written later are only in the
#       qcow2 file, so the data file by itself is another disk than the guest's.
set -euo pipefail

# A qcow2 can keep its data in a file of their own. With data_file_raw=on that file is at each moment the whole disk, for
# programs that know no qcow2 (a backup, a mount). An autoclear bit of the header says so. A program that does not keep the
# promise has to clear the bit when it writes.
#
# Guessed before the first run: imago writes zeros only into its tables, and leaves the bit: an image that breaks its promise.
# Seen: it clears the bit already when the image is opened for writing, as the format asks for, and then writes zeros only into
#       the tables. Nothing is printed, and no call tells of it. qemu-img keeps the bit, and writes the zeros into the data file.
# So a program that reads the data file alone has to look at the bit each time: any program may have cleared it.
#
# Needs cargo and qemu-img. Ends with 1 if the behaviour has changed.

dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT; cd "$dir"
mkdir -p p/src
cat > p/Cargo.toml <<'C'
[package]
name = "p"
version = "0.1.0"
edition = "2021"
[workspace]
[dependencies]
imago = { version = "=0.2.6", default-features = false, features = ["sync"] }
C
cat > p/src/main.rs <<'R'
use imago::file::File;
use imago::qcow2::Qcow2;
use imago::{FormatAccess, FormatDriverBuilder, PermissiveImplicitOpenGate};

fn main() -> std::io::Result<()> {
    let what = std::env::args().nth(1).unwrap();
    let image = Qcow2::<File>::builder_path("disk.qcow2");
    let image = FormatAccess::new(image.write(what != "read").open(PermissiveImplicitOpenGate::default())?);
    match what.as_str() {
        "read" => image.read(&mut vec![0; 4096], 0)?,
        "open" => {}
        _ => image.write_zeroes(65536, 65536)?,
    }
    image.flush()
}
R
cargo build -q --manifest-path p/Cargo.toml
head -c 1048576 /dev/urandom > disk.raw
tell() {
    qemu-img convert -O raw disk.qcow2 guest.raw
    local same=differs
    cmp -s guest.raw data.raw && same="is the disk"
    echo "$1: $(qemu-img info disk.qcow2 | sed -n 's/^ *\(data file raw: .*\)/\1/p'), the data file $same"
}
make() {
    rm -f data.raw disk.qcow2
    qemu-img convert -f raw -O qcow2 -o "data_file=$dir/data.raw,data_file_raw=on" disk.raw disk.qcow2
}
{
    make; tell "made by qemu-img"
    qemu-io -c 'write -z 64k 64k' disk.qcow2 > io.log; tell "zeros by QEMU"
    make
    for what in read open zeros; do
        p/target/debug/p "$what"; tell "imago, $what"
    done
} | tee seen
cat > expected <<'X'
made by qemu-img: data file raw: true, the data file is the disk
zeros by QEMU: data file raw: true, the data file is the disk
imago, read: data file raw: true, the data file is the disk
imago, open: data file raw: false, the data file is the disk
imago, zeros: data file raw: false, the data file differs
X
diff expected seen
echo "as seen before: opened for writing by imago, a raw data file is none any more"
