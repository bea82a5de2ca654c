//! Comparison of losses.

/// Checks losses on a device against those on the CPU.
pub fn assert_close(got: &[f32], expected: &[f32]) {
    assert_eq!(got.len(), expected.len());
    for (step, (a, b)) in got.iter().zip(expected).enumerate() {
        assert!(
            (a - b).abs() <= 1e-4 * b.abs().max(1.0),
            "step {step}: {a} on the device, {b} on the CPU"
        );
    }
}
