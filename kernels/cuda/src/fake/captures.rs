//! Captures that the driver invalidates.

use super::FakeDriver;
use crate::driver::{DriverError, Edges, Node};
use crate::{Device, Limits};

const CAPTURE_INVALIDATED: i32 = 901;

/// The driver's call succeeds, and says only by the status that there is no front.
#[test]
fn an_invalidated_capture_has_no_front() {
    let Some(driver) = FakeDriver::install() else {
        return;
    };
    let limits = Limits {
        fraction: 0.75,
        bytes_max: None,
        preallocate: false,
    };
    let device = Device::open(0, limits).expect("it is there");
    let edges = Edges::of_driver().expect("it has them");
    let invalidated = |front: Result<Vec<Node>, DriverError>| {
        let failed =
            |e| matches!(e, DriverError::Failed { status, .. } if status == CAPTURE_INVALIDATED);
        front.is_err_and(failed)
    };
    let captured = device.stream.capture(|| {
        assert_eq!(edges.front(&device.stream), Ok(Vec::new()));
        driver.fail("cuStreamGetCaptureInfo_v3", 0, CAPTURE_INVALIDATED);
        assert!(invalidated(edges.front(&device.stream)));
        Ok(())
    });
    assert!(captured.is_err());
    assert!(invalidated(edges.front(&device.stream)), "it has ended");
    assert_eq!(device.synchronize(), Ok(()));
}
