//! Memory that the driver refuses or still holds, over a driver without a device.

use std::thread;
use std::time::Duration;

use slabwise_cuda::fake::FakeDriver;
use slabwise_cuda::{Device, Limits};

/// Bytes of the device that slabwise may use.
const LIMIT: u64 = (64 << 20) / 4 * 3;

fn open(preallocate: bool) -> Device {
    let limits = Limits {
        fraction: 0.75,
        bytes_max: None,
        preallocate,
    };
    Device::open(0, limits).expect("it is there")
}

/// While a thread closes a device, its memory is still taken.
#[test]
fn a_device_is_opened_again_once_it_is_closed() {
    let Some(driver) = FakeDriver::install() else {
        return;
    };
    let mut device = open(true);
    device.reserve(256).expect("room");
    driver.set("unmaps", 0);
    driver.set("unmap_us", 200_000);
    let closing = thread::spawn(move || drop(device));
    while driver.get("unmaps") == 0 {
        thread::sleep(Duration::from_millis(1));
    }
    let mut device = open(true);
    device.reserve(256).expect("room");
    closing.join().expect("no panic");
    assert_eq!(device.usage().reserved, LIMIT);
}
