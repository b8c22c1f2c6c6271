#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| ferrite_hostile_inputs::run("pool_wire", input));
