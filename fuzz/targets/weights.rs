//! A safetensors or GGUF file: any bytes are read safely or rejected.
#![no_main]

#[path = "../../tests/support/readers.rs"]
mod readers;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let _ = readers::read("weights", bytes);
});
