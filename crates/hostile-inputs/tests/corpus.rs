//! Everything that the fuzzer has kept, once more: a failure that it once found must not come back.

use std::fs;
use std::path::{Path, PathBuf};

use ferrite_hostile_inputs::{TARGETS, run};

fn corpora() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus")
}

fn replay(target: &str) {
    let mut inputs: Vec<_> =
        fs::read_dir(corpora().join(target)).unwrap().map(|entry| entry.unwrap().path()).collect();
    inputs.sort();
    assert!(!inputs.is_empty(), "no corpus for {target}");
    for path in inputs {
        // Of a failing test, this says which input it was.
        println!("{}", path.display());
        run(target, &fs::read(&path).unwrap());
    }
}

macro_rules! corpora {
    ($($target:ident)*) => {
        $(#[test] fn $target() { replay(stringify!($target)); })*

        #[test]
        fn every_target_has_its_corpus_and_its_fuzz_target() {
            let tested = [$(stringify!($target)),*];
            assert_eq!(TARGETS.map(|(name, _)| name), tested);
            for name in tested {
                let program = corpora().join(format!("../fuzz_targets/{name}.rs"));
                assert!(program.exists(), "{} is missing", program.display());
            }
        }
    };
}

corpora!(
    counters dedup_journal dedup_pages dedup_store dedup_superblock dirty_map image_name journal nbd nbd_client
    nbd_relay nbd_replies nbd_uri net_slots pool_wire qcow2 ring size state store_client store_keys store_wire trace tunnel
    vhd vhost vhost_ring
);
