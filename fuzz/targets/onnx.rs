//! An ONNX model: any bytes are imported and planned safely, or rejected.
#![no_main]

#[path = "../../tests/support/readers.rs"]
mod readers;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let _ = readers::read("onnx", bytes);
});
