//! Memory that the driver refuses or still holds, over a driver without a device.

use std::thread;
use std::time::Duration;

use slabwise_cuda::fake::FakeDriver;
use slabwise_cuda::{Device, Limits};
use slabwise_kernels::memory::Region;

const INVALID_VALUE: i32 = 1;
const OUT_OF_MEMORY: i32 = 2;
const OPERATING_SYSTEM: i32 = 304;
const NOT_SUPPORTED: i32 = 801;

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

fn bytes(device: &Device, region: &Region) -> Vec<u8> {
    let mut bytes = vec![0; region.bytes as usize];
    device.read(region, &mut bytes).expect("it is read");
    bytes
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

/// A driver may say that it maps pages, and refuse to: then memory is allocated.
#[test]
fn memory_is_allocated_where_pages_are_not_mapped_after_all() {
    let Some(driver) = FakeDriver::install() else {
        return;
    };
    let (before, ranges) = (driver.get("live_bytes"), driver.get("live_ranges"));
    for (call, code) in [
        ("cuMemAddressReserve", NOT_SUPPORTED),
        ("cuMemAddressReserve", OUT_OF_MEMORY),
        ("cuMemCreate", NOT_SUPPORTED),
        ("cuMemMap", INVALID_VALUE),
        ("cuMemSetAccess", NOT_SUPPORTED),
    ] {
        driver.fail(call, 0, code);
        let mut device = open(true);
        let region = device
            .reserve(1000)
            .unwrap_or_else(|e| panic!("{call}: {e}"));
        device.fill(&region, 7).expect("it is filled");
        assert_eq!(bytes(&device, &region), [7; 1000]);
        assert_eq!(device.usage().reserved, LIMIT, "{call}");
        assert_eq!(driver.get("live_bytes") - before, LIMIT as i64, "{call}");
        assert_eq!(driver.get("live_ranges"), ranges, "{call} leaves addresses");
        drop(device);
        assert_eq!(driver.get("live_bytes"), before, "{call}");
    }
}

/// Where memory is taken on demand, a refusal to map pages is known before the first arena or range
/// needs any.
#[test]
fn memory_on_demand_is_allocated_where_pages_are_not_mapped_after_all() {
    let Some(driver) = FakeDriver::install() else {
        return;
    };
    let (before, ranges) = (driver.get("live_bytes"), driver.get("live_ranges"));
    for (call, code) in [
        ("cuMemAddressReserve", NOT_SUPPORTED),
        ("cuMemCreate", NOT_SUPPORTED),
        ("cuMemMap", INVALID_VALUE),
        ("cuMemSetAccess", NOT_SUPPORTED),
    ] {
        driver.fail(call, 0, code);
        let mut device = open(false);
        assert_eq!(device.has_ranges(), Ok(false), "{call}");
        assert_eq!(device.range(1 << 20), Ok(None), "{call}");
        assert_eq!(driver.get("live_bytes"), before, "{call}");
        drop(device);
        driver.fail(call, 0, code);
        let mut device = open(false);
        let region = device
            .reserve(1000)
            .unwrap_or_else(|e| panic!("{call}: {e}"));
        device.fill(&region, 7).expect("it is filled");
        assert_eq!(bytes(&device, &region), [7; 1000]);
        assert_eq!(device.usage().reserved, 1024, "{call}");
        assert_eq!(driver.get("live_bytes") - before, 1024, "{call}");
        assert_eq!(driver.get("live_ranges"), ranges, "{call} leaves addresses");
    }
    // A shortage of memory is no refusal.
    for call in ["cuMemCreate", "cuMemMap", "cuMemSetAccess"] {
        driver.fail(call, 0, OUT_OF_MEMORY);
        let mut device = open(false);
        assert_eq!(device.has_ranges(), Ok(true), "{call}");
        device.reserve(1000).expect("room");
    }
    // Nothing stays mapped if nothing is refused.
    let device = open(false);
    assert_eq!(device.has_ranges(), Ok(true));
    assert_eq!(
        (driver.get("live_bytes"), device.usage().reserved),
        (before, 0)
    );
}

/// Inputs are copied from other memory of the host where none can be pinned.
#[test]
fn inputs_are_staged_without_pinned_memory() {
    let Some(driver) = FakeDriver::install() else {
        return;
    };
    for code in [OUT_OF_MEMORY, OPERATING_SYSTEM] {
        let mut device = open(false);
        let x = device.reserve(256).expect("room");
        driver.fail("cuMemHostAlloc", 0, code);
        device.prepare_staging(256).expect("it does without");
        for turn in 0..4u8 {
            device.begin_staging().expect("it begins");
            device
                .stage(&x, &mut |bytes: &mut [u8]| bytes.fill(turn))
                .expect("it is staged");
            device.end_staging().expect("it ends");
            assert_eq!(bytes(&device, &x), [turn; 256]);
        }
    }
    assert_eq!(driver.get("live_pinned"), 0);
}

/// An arena that cannot be zeroed is no arena, and a fault record that cannot be filled no record.
#[test]
fn memory_that_cannot_be_filled_is_given_back() {
    let Some(driver) = FakeDriver::install() else {
        return;
    };
    let mut device = open(false);
    driver.fail("cuMemsetD8Async", 0, OUT_OF_MEMORY);
    device.reserve(1000).expect_err("it was told to fail");
    assert_eq!(device.usage().used, 0);
    driver.fail("cuMemsetD8Async", 0, OUT_OF_MEMORY);
    device.prepare_faults().expect_err("it was told to fail");
    assert_eq!(device.usage().used, 0);
    device.prepare_faults().expect("it fails once");
}

/// Memory is released once no stream uses it, also those of copies and prefetches.
#[test]
fn memory_is_released_after_the_work_of_all_streams() {
    let Some(_driver) = FakeDriver::install() else {
        return;
    };
    let mut device = open(false);
    let slots = device.reserve(512).expect("room");
    let queue = device.open_queue(slots, 2).expect("it is opened");
    device.synchronize().expect("the device is fine");
    let write = |bytes: &mut [u8]| -> Result<(), ()> {
        bytes.fill(1);
        Ok(())
    };
    let sent = device.send_ahead(queue, 0, write);
    assert_eq!(sent, Ok(Ok(())));
    device.release(slots.arena);
    assert_eq!(device.synchronize(), Ok(()));
    device.prepare_copies(1).expect("it has streams");
    let host = device.reserve_host(256).expect("room on the host");
    let from = device.reserve(256).expect("room");
    device.synchronize().expect("the device is fine");
    device.start_copy(0, &from, &host).expect("it is started");
    device.release(from.arena);
    assert_eq!(device.synchronize(), Ok(()));
    device.settle_copies().expect("it was memory");
}

/// A session may go to another thread between two calls.
#[test]
fn faults_are_looked_for_by_any_thread() {
    let Some(_driver) = FakeDriver::install() else {
        return;
    };
    let mut device = open(false);
    device.prepare_faults().expect("room");
    let looked = thread::spawn(move || (device.look_for_faults(), device));
    let (looked, device) = looked.join().expect("no panic");
    assert_eq!(looked, Ok(()));
    assert_eq!(device.synchronize(), Ok(()));
}

/// Batches are sent ahead from other memory of the host where none can be pinned.
#[test]
fn batches_are_sent_ahead_without_pinned_memory() {
    let Some(driver) = FakeDriver::install() else {
        return;
    };
    let mut device = open(false);
    let [slots, x] = [512, 256].map(|bytes| device.reserve(bytes).expect("room"));
    driver.fail("cuMemHostAlloc", 0, OUT_OF_MEMORY);
    let queue = device.open_queue(slots, 2).expect("it does without");
    for turn in 0..6u8 {
        let slot = usize::from(turn % 2);
        let write = |bytes: &mut [u8]| -> Result<(), ()> {
            bytes.fill(turn);
            Ok(())
        };
        let sent = device.send_ahead(queue, slot, write);
        assert_eq!(sent, Ok(Ok(())));
        let parts = std::iter::once((0, x));
        device.take_ahead(queue, slot, parts).expect("it is taken");
        assert_eq!(bytes(&device, &x), [turn; 256]);
    }
}
