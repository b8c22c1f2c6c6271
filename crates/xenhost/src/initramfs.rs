//! The guests' initial RAM disk: a cached base with the programs, and before it an init for each boot.

use crate::packages::as_root;
use crate::steps::run_logged;
use anyhow::{Context, Result};
use std::path::Path;

/// Programs from dom0's root, with their libraries.
pub(crate) const PROGRAMS: &[&str] = &[
    "/usr/bin/busybox",
    "/usr/bin/fio",
    "/usr/bin/dd",
    "/usr/bin/cmp",
    "/usr/sbin/mkfs.ext4",
    "/usr/sbin/e2fsck",
    "/usr/sbin/resize2fs",
    "/usr/sbin/sfdisk",
    "/usr/sbin/blkdiscard",
    "/usr/sbin/blockdev",
    "/usr/sbin/fstrim",
];

/// Kernel modules with their dependencies; `load-MODULE` in the guest inserts them in order.
pub(crate) const MODULES: &[&str] = &["xen-blkfront", "ext4"];

/// The scripts that make the base, as part of the recipe.
pub(crate) const RECIPE: &[&str] = &[MAKE_BASE, MAKE_STUB];

/// Debian's fio is linked with client libraries of network storage: each start of fio would load and relocate 50 MB,
/// most of a guest's time under emulation. A stub library defines the functions that fio imports from them, with their
/// versions, and replaces all these libraries.
const MAKE_STUB: &str = r#"
real='^(libc|libm|libz|libaio)\.so'
foreign=$(readelf -d "$tree/usr/bin/fio" | sed -n 's/.*NEEDED.*\[\(.*\)\]/\1/p' | grep -vE "$real" || true)
zlib=$(echo "$tree"/usr/lib/x86_64-linux-gnu/libz.so.1)
nm -D --defined-only "$zlib" | awk '{print $3}' | sed 's/@.*//' >"$stage.real"
nm -D --undefined-only "$tree/usr/bin/fio" | awk '$1=="U"{print $2}' \
    | grep -vE '@(GLIBC|LIBAIO)_' | grep -vxFf "$stage.real" | sort -u >"$stage.symbols"
sed 's/@.*//; s/.*/long &(void) { return -1; }/' "$stage.symbols" >"$stage.c"
awk -F@ 'NF>1{names[$NF]=names[$NF] $1 ";"} END{for (v in names) print v " { global: " names[v] " };"}' \
    "$stage.symbols" >"$stage.map"
mkdir -p "$stage/usr/lib/x86_64-linux-gnu"
cc -w -fno-builtin -shared -fPIC -nostdlib -Wl,--version-script="$stage.map" \
    -o "$stage/usr/lib/x86_64-linux-gnu/libstub.so" "$stage.c"
for library in $foreign; do
    ln -s libstub.so "$stage/usr/lib/x86_64-linux-gnu/$library"
done
rm -f "$stage.real" "$stage.symbols" "$stage.c" "$stage.map"
"#;

/// The part that is the same for all boots, made once from the root's files. Modules are stored unpacked, as the
/// guest's small insmod requires.
const MAKE_BASE: &str = r#"
umask 022
tree=$1 kernel=$2 out=$3 programs=$4 modules=$5
stage=$out.stage
rm -rf "$stage"
mkdir -p "$stage"/bin "$stage"/usr/lib/modules "$stage"/usr/lib64 "$stage"/proc "$stage"/sys "$stage"/dev "$stage"/tmp \
    "$stage"/run "$stage"/mnt "$stage"/etc
ln -s usr/lib "$stage/lib"
ln -s usr/lib64 "$stage/lib64"
for program in $programs; do
    cp -L "$tree$program" "$stage/bin/"
    list=
    case $program in
        */fio) list=$(for name in libc.so.6 libm.so.6 libz.so.1 libaio.so.1 libaio.so.1t64; do
            ls "$tree/usr/lib/x86_64-linux-gnu/$name" 2>/dev/null | sed "s|^$tree||" || true; done) ;;
        # A static program has no libraries, and ldd fails for it.
        *) list=$(chroot "$tree" ldd "$program" 2>/dev/null | grep -o '/[^ ]*' || true) ;;
    esac
    for library in $list; do
        [ -e "$stage$library" ] && continue
        mkdir -p "$stage$(dirname "$library")"
        cp -L "$tree$library" "$stage$library"
    done
done
@MAKE_STUB@
for module in $modules; do
    for file in $(chroot "$tree" modprobe -S "$kernel" --show-depends "$module" | awk '$1=="insmod"{print $2}'); do
        name=$(basename "$file"); name=${name%.xz}
        case $file in
            *.xz) xz -dc "$tree$file" >"$stage/usr/lib/modules/$name" ;;
            *) cp "$tree$file" "$stage/usr/lib/modules/$name" ;;
        esac
        # Without its signature: checking one takes an emulated guest seconds.
        strip --strip-debug "$stage/usr/lib/modules/$name"
        echo "insmod /lib/modules/$name" >>"$stage/bin/load-$module"
    done
    chmod 755 "$stage/bin/load-$module"
done
(cd "$stage" && find . | LC_ALL=C sort | cpio --quiet -o -H newc -R 0:0) | gzip -1 >"$out"
chmod 644 "$out"
rm -rf "$stage"
"#;

/// Packs the base of the guests' RAM disk from the finished root in `tree` into `out`.
pub(crate) fn make_base(tree: &Path, kernel: &str, out: &Path, log: &Path) -> Result<()> {
    let mut shell = as_root("sh");
    let script = MAKE_BASE.replace("@MAKE_STUB@", MAKE_STUB);
    shell.args(["-ec", &script, "make-base"]).arg(tree).arg(kernel).arg(out);
    shell.arg(PROGRAMS.join(" ")).arg(MODULES.join(" "));
    run_logged(&mut shell, log).context("cannot make the guests' initial RAM disk")
}

/// Writes a whole RAM disk: an archive with `init`, then the base. The kernel unpacks archives one after the other; the
/// first is uncompressed, so Xen's domain builder does not try to unpack them.
pub(crate) fn assemble(base: &Path, init: &str, out: &Path) -> Result<()> {
    init_only(init, out)?;
    let mut file = std::fs::File::options().append(true).open(out)?;
    let mut base =
        std::fs::File::open(base).with_context(|| format!("cannot read {}", base.display()))?;
    std::io::copy(&mut base, &mut file)?;
    Ok(())
}

/// The first archive alone, for a boot loader that passes several to the kernel.
pub(crate) fn init_only(init: &str, out: &Path) -> Result<()> {
    let mut image = Vec::new();
    append_entry(&mut image, "init", 0o100_755, init.as_bytes());
    append_entry(&mut image, "TRAILER!!!", 0, b"");
    while !image.len().is_multiple_of(512) {
        image.push(0);
    }
    std::fs::write(out, image).with_context(|| format!("cannot write {}", out.display()))
}

/// One member of a "newc" cpio archive: 110 bytes of hexadecimal fields, name, data, each padded
/// to four bytes.
fn append_entry(image: &mut Vec<u8>, name: &str, mode: u32, data: &[u8]) {
    let name_bytes = name.len() + 1;
    let fields = [
        1, // inode; one file only has no links to tell apart
        mode,
        0,
        0,
        1,
        0,
        u32::try_from(data.len()).unwrap_or(u32::MAX),
        0,
        0,
        0,
        0,
        u32::try_from(name_bytes).unwrap_or(u32::MAX),
        0,
    ];
    image.extend_from_slice(b"070701");
    for field in fields {
        image.extend_from_slice(format!("{field:08x}").as_bytes());
    }
    image.extend_from_slice(name.as_bytes());
    image.push(0);
    pad4(image);
    image.extend_from_slice(data);
    pad4(image);
}

fn pad4(image: &mut Vec<u8>) {
    while !image.len().is_multiple_of(4) {
        image.push(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_member_is_padded_to_four_bytes_after_name_and_data() {
        let mut image = Vec::new();
        append_entry(&mut image, "init", 0o100_755, b"abcde");
        assert_eq!(image.len() % 4, 0);
        assert_eq!(&image[..6], b"070701");
        assert_eq!(&image[6 + 8..6 + 16], b"000081ed");
        assert_eq!(&image[6 + 6 * 8..6 + 7 * 8], b"00000005");
        let data = image.len() - 8;
        assert_eq!(&image[data..], b"abcde\0\0\0");
    }
}
