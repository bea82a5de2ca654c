//! Copies that overlap a device's work, over a driver that makes them as late or as early as events
//! allow; and pages that are mapped, unmapped and remapped.

use slabwise_cuda::driver::DriverError;
use slabwise_cuda::fake::FakeDriver;
use slabwise_cuda::{Device, Dispatch, Function, Launch, Limits, Lowered, Run, Word, Work};
use slabwise_kernels::memory::Region;
use slabwise_kernels::size::Env;

const INVALID_VALUE: i32 = 1;
const OUT_OF_MEMORY: i32 = 2;

fn open() -> Device {
    Device::open(
        0,
        Limits {
            fraction: 0.75,
            bytes_max: None,
            preallocate: false,
        },
    )
    .expect("it is there")
}

/// A kernel that adds 1 to 64 bytes, and writes the sums elsewhere.
fn add() -> Lowered {
    let text = "extern \"C\" __global__ void NAME(const __grid_constant__ Words<2> p) {\n    \
                const int i = threadIdx.x;\n    \
                ((unsigned char*)p.w[1])[i] = (unsigned char)(((const unsigned char*)p.w[0])[i] + 1);\n}\n";
    Lowered::new(vec![Function::new("add_one", text)], 0, |_: &Env| {
        let words = vec![Word::Argument(0), Word::Argument(1)];
        vec![Dispatch {
            function: 0,
            grid: [1, 1, 1],
            block: [64, 1, 1],
            shared_bytes: 0,
            words,
        }]
    })
}

fn bytes(device: &Device, region: &Region) -> Vec<u8> {
    let mut bytes = vec![0; region.bytes as usize];
    device.read(region, &mut bytes).expect("it is read");
    bytes
}

/// `x + 1` is copied to the host while other kernels write its region, and is copied back to
/// another region. Captured or not, in both modes of the driver, every run has the same result.
#[test]
fn copies_are_ordered_after_producers_and_before_consumers() {
    let Some(driver) = FakeDriver::install() else {
        return;
    };
    for (eager, recorded) in [(0, false), (1, false), (0, true), (1, true)] {
        driver.set("eager", eager);
        let mut device = open();
        let kernel = add();
        let program = device.load(&[&kernel]).expect("the kernel is fine");
        let [x, made, back, sum] = [(); 4].map(|()| device.reserve(64).expect("room"));
        let host = device.reserve_host(64).expect("room on the host");
        device.prepare_copies(2).expect("the driver is fine");
        let none = x.part(0, 0);
        let run = |arguments| {
            Work::Launch(Launch {
                step: 0,
                kernel: &kernel,
                arguments,
                workspace: none,
            })
        };
        let arguments = [[x, made], [x, x], [back, sum], [back, back], [x, made]];
        let steps = [
            run(&arguments[0]),
            Work::Start {
                copy: 0,
                from: made,
                to: host,
            },
            run(&arguments[1]),
            Work::Finish(0),
            // It has been copied out: other data uses its region.
            Work::Launch(Launch {
                step: 0,
                kernel: &kernel,
                arguments: &arguments[4],
                workspace: none,
            }),
            Work::Start {
                copy: 1,
                from: host,
                to: back,
            },
            run(&arguments[1]),
            Work::Finish(1),
            run(&arguments[2]),
            // Overwrites the copied data before the next run copies again.
            run(&arguments[3]),
        ];
        device.fill(&x, 10).expect("it is filled");
        let env = Env::default();
        for turn in 0..4u8 {
            let made_before = driver.get("allocations");
            if recorded {
                if turn == 0 {
                    let run = Run {
                        key: &[1],
                        env: &env,
                        checked: false,
                        after: None,
                        early: false,
                    };
                    device
                        .record(&program, &run, steps.iter().copied())
                        .expect("it is recorded");
                }
                assert!(device.replay(&program, &[1]).expect("the device is fine"));
            } else {
                for step in &steps {
                    match *step {
                        Work::Launch(launch) => device
                            .launch(&program, &env, &launch)
                            .expect("it is launched"),
                        Work::Start { copy, from, to } => {
                            device.start_copy(copy, &from, &to).expect("it is started")
                        }
                        Work::Finish(copy) => device.finish_copy(copy).expect("it is waited for"),
                    }
                }
            }
            assert!(
                turn == 0 || driver.get("allocations") == made_before,
                "turn {turn}"
            );
            if turn % 2 == 1 {
                // Two runs have been executed. Each adds 2 to x, and twice one to the initial value
                // of x.
                let begin = 10 + 2 * turn;
                let seen = [x, made, back, sum].map(|region| bytes(&device, &region)[63]);
                assert_eq!(
                    seen,
                    [begin + 2, begin + 2, begin + 2, begin + 2],
                    "eager {eager}, recorded {recorded}, turn {turn}"
                );
            }
        }
    }
    assert_eq!(driver.get("pinned_bytes"), 0);
}

#[test]
fn invalid_copies_are_refused() {
    let Some(_driver) = FakeDriver::install() else {
        return;
    };
    let mut device = open();
    let (x, host) = (
        device.reserve(64).expect("room"),
        device.reserve_host(64).expect("room"),
    );
    let error = device
        .start_copy(0, &x, &host)
        .expect_err("nothing was prepared");
    assert!(
        error.to_string().contains("no copies were prepared for"),
        "{error}"
    );
    device.prepare_copies(2).expect("the driver is fine");
    let error = device.finish_copy(2).expect_err("there are two");
    assert!(
        error
            .to_string()
            .contains("it is copy 2, and 2 were prepared for"),
        "{error}"
    );
    let panics =
        |work: &dyn Fn()| std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)).is_err();
    let copied =
        |from: &Region, to: &Region| device.start_copy(0, from, to).expect("the driver is fine");
    assert!(
        panics(&|| copied(&x, &x.part(0, 64))),
        "not within the device"
    );
    assert!(
        panics(&|| copied(&host, &x.part(0, 32))),
        "not of other lengths"
    );
    let reached = |of: &dyn Fn() -> u64| panics(&|| assert_eq!(of(), 0, "an address"));
    assert!(
        reached(&|| device.address(&host)) && reached(&|| device.host_address(&x)),
        "kernels do not reach the host"
    );
}

/// A run that fails half-way leaves a copy without a wait; later work is correct after settling.
#[test]
fn a_refused_copy_leaves_no_work_in_flight() {
    let Some(driver) = FakeDriver::install() else {
        return;
    };
    for call in ["cuEventRecord", "cuStreamWaitEvent", "cuMemcpyDtoHAsync_v2"] {
        let mut device = open();
        let (x, host) = (
            device.reserve(64).expect("room"),
            device.reserve_host(64).expect("room"),
        );
        device.prepare_copies(2).expect("the driver is fine");
        device.fill(&x, 1).expect("it is filled");
        device.start_copy(0, &x, &host).expect("it is started");
        driver.fail(call, 0, INVALID_VALUE);
        let error = device
            .start_copy(1, &x, &host)
            .expect_err("it was told to fail");
        assert!(
            error.to_string().contains(call.trim_end_matches("_v2")),
            "{call}: {error}"
        );
        device.settle_copies().expect("the driver is fine");
        device.fill(&x, 2).expect("it is filled");
        device.start_copy(1, &host, &x).expect("it is started");
        device.finish_copy(1).expect("it is waited for");
        assert_eq!(bytes(&device, &x), vec![1; 64], "{call}");
    }
}

/// Batches are prefetched through a ring of slots while the device reads earlier ones: each run
/// sees its own.
#[test]
fn prefetched_batches_arrive_in_order() {
    let Some(driver) = FakeDriver::install() else {
        return;
    };
    for (eager, slots) in [(0, 1), (1, 1), (0, 3), (1, 3)] {
        driver.set("eager", eager);
        let mut device = open();
        let [input, seen] = [64, 64 * 16].map(|bytes| device.reserve(bytes).expect("room"));
        let ring_bytes = device.reserve(128 * slots as u64).expect("room");
        let pinned = driver.get("pinned_bytes");
        let queue = device.open_queue(ring_bytes, slots).expect("room");
        assert_eq!(driver.get("pinned_bytes") - pinned, 128 * slots as i64);
        let send = |device: &mut Device, batch: usize| {
            let sent = device.send_ahead(queue, batch % slots, |bytes| {
                bytes[64..].fill(batch as u8 + 1);
                if batch == 20 { Err("no batch") } else { Ok(()) }
            });
            sent.expect("the driver is fine")
        };
        (0..slots).for_each(|batch| send(&mut device, batch).expect("a batch"));
        for batch in 0..16 {
            let made = driver.get("allocations");
            device
                .take_ahead(queue, batch % slots, [(64, input)].into_iter())
                .expect("it is there");
            // Takes the place of the run.
            device
                .copy(&input, &seen.part(64 * batch as u64, 64))
                .expect("it is copied");
            // Only the runs that consume the last batches wait for them.
            if batch + slots < 16 {
                send(&mut device, batch + slots).expect("a batch");
            }
            assert_eq!(driver.get("allocations"), made);
        }
        let seen = bytes(&device, &seen);
        (0..16).for_each(|batch| {
            assert_eq!(
                seen[64 * batch..64 * (batch + 1)],
                [batch as u8 + 1; 64],
                "eager {eager}, {slots} slots"
            )
        });
        assert_eq!(send(&mut device, 20), Err("no batch"));
    }
}

const PAGE: u64 = 2 << 20;

fn range(device: &mut Device) -> (Region, impl Fn(u64, u64) -> Region + use<>) {
    let (arena, page) = device
        .range(16 * PAGE)
        .expect("the driver is fine")
        .expect("memory is mapped");
    assert_eq!(page, PAGE);
    (
        Region {
            arena,
            offset: 0,
            bytes: 16 * PAGE,
        },
        move |at, count| Region {
            arena,
            offset: at * PAGE,
            bytes: count * PAGE,
        },
    )
}

#[test]
fn pages_are_mapped_unmapped_and_remapped_without_copies() {
    let Some(driver) = FakeDriver::install() else {
        return;
    };
    let before = driver.get("live_bytes");
    let held = || driver.get("live_bytes") - before;
    let mut device = open();
    let (_, pages) = range(&mut device);
    assert_eq!(held(), 0, "addresses are no memory");
    device.map(&pages(0, 4)).expect("room");
    assert_eq!(
        (held() as u64, device.usage().reserved, device.usage().used),
        (4 * PAGE, 4 * PAGE, 4 * PAGE)
    );
    for page in 0..4 {
        device
            .fill(&pages(page, 1), page as u8)
            .expect("it is memory");
    }
    // The second and the last page are remapped together after the rest.
    let copied = driver.get("copied_bytes");
    device
        .remap(&[pages(1, 1), pages(3, 1)], &pages(8, 2))
        .expect("the driver is fine");
    assert_eq!(
        (held() as u64, driver.get("copied_bytes")),
        (4 * PAGE, copied)
    );
    let seen = bytes(&device, &pages(8, 2));
    assert!(
        seen[..PAGE as usize].iter().all(|b| *b == 1)
            && seen[PAGE as usize..].iter().all(|b| *b == 3)
    );
    assert!(
        bytes(&device, &pages(2, 1)).iter().all(|b| *b == 2),
        "others stay"
    );
    // Work in flight is waited for.
    device.fill(&pages(8, 2), 9).expect("it is memory");
    device.unmap(&pages(8, 2));
    device
        .map(&pages(1, 1))
        .expect("the addresses are free again");
    device.fill(&pages(0, 3), 7).expect("it is memory");
    device.synchronize().expect("all of it is");
    assert_eq!(held() as u64, 3 * PAGE);
    // The limit counts pages and arenas together.
    let limit = device.usage().limit;
    let rest = limit - 3 * PAGE;
    assert_eq!(
        device.reserve(rest + 1).map(|_| ()),
        Err(DriverError::OutOfMemory { bytes: rest + 1 })
    );
    let arena = device.reserve(rest).expect("all of the rest");
    assert_eq!(
        device.map(&pages(4, 1)),
        Err(DriverError::OutOfMemory { bytes: PAGE })
    );
    device.release(arena.arena);
    device
        .map(&pages(4, 1))
        .expect("freed memory is available again");
    device.fill(&pages(4, 1), 7).expect("it is memory");
    drop(device);
    assert_eq!(held(), 0);
}

#[test]
fn a_large_device_is_mapped_in_larger_pages() {
    let Some(driver) = FakeDriver::install() else {
        return;
    };
    driver.set("total", 64 << 30);
    let mut device = open();
    let (arena, page) = device
        .range(1 << 34)
        .expect("the driver is fine")
        .expect("memory is mapped");
    assert_eq!(page, 16 << 20, "48 GiB in 3072 pages");
    let pages = Region {
        arena,
        offset: 2 * page,
        bytes: 2 * page,
    };
    device.map(&pages).expect("room");
    device
        .fill(&pages.part(page - 1, 2), 5)
        .expect("it is memory");
    assert_eq!(bytes(&device, &pages.part(page - 1, 2)), [5, 5]);
}

#[test]
fn failed_driver_calls_leave_pages_unchanged() {
    let Some(driver) = FakeDriver::install() else {
        return;
    };
    let before = driver.get("live_bytes");
    for call in ["cuMemCreate", "cuMemMap", "cuMemSetAccess"] {
        for after in 0..3 {
            let mut device = open();
            let (_, pages) = range(&mut device);
            device.map(&pages(0, 3)).expect("room");
            (0..3).for_each(|page| {
                device
                    .fill(&pages(page, 1), page as u8 + 1)
                    .expect("it is memory")
            });
            driver.fail(call, after, OUT_OF_MEMORY);
            let mapped = device.map(&pages(5, 3));
            let refused =
                matches!(mapped, Err(DriverError::OutOfMemory { bytes }) if bytes == 3 * PAGE);
            assert!(
                refused || (call == "cuMemSetAccess" && after > 0 && mapped.is_ok()),
                "{call}, {after}: {mapped:?}"
            );
            driver.fail("", -1, 0);
            let expected = if refused { 3 } else { 6 };
            assert_eq!(
                (driver.get("live_bytes") - before) as u64,
                expected * PAGE,
                "{call}, {after}"
            );
            assert_eq!(device.usage().used, expected * PAGE);
            if refused {
                device.map(&pages(5, 3)).expect("it failed once");
            }
            driver.fail(call, after, INVALID_VALUE);
            let moved = device.remap(&[pages(0, 1), pages(1, 2)], &pages(10, 3));
            driver.fail("", -1, 0);
            let at = if moved.is_ok() { 10 } else { 0 };
            assert!(
                moved.is_err() || call == "cuMemCreate" || (call == "cuMemSetAccess" && after > 0),
                "{call}, {after}"
            );
            (0..3).for_each(|page| {
                assert_eq!(
                    bytes(&device, &pages(at + page, 1))[77],
                    page as u8 + 1,
                    "{call}, {after}"
                )
            });
            if moved.is_err() {
                device
                    .remap(&[pages(0, 1), pages(1, 2)], &pages(10, 3))
                    .expect("it failed once");
            }
            device.map(&pages(0, 3)).expect("their addresses are free");
            assert_eq!(
                (driver.get("live_bytes") - before) as u64,
                9 * PAGE,
                "{call}, {after}"
            );
        }
    }
    assert_eq!(driver.get("live_bytes"), before);
}

#[test]
fn a_preallocated_or_unmapped_device_has_no_page_ranges() {
    let Some(driver) = FakeDriver::install() else {
        return;
    };
    for (maps_pages, preallocate) in [(0, false), (0, true), (1, true)] {
        driver.set("maps_pages", maps_pages);
        let mut device = Device::open(
            0,
            Limits {
                fraction: 0.75,
                bytes_max: None,
                preallocate,
            },
        )
        .expect("it is there");
        assert!(!device.has_ranges().expect("the driver is fine"));
        assert_eq!(device.range(16 * PAGE), Ok(None));
        device.reserve(1000).expect("arenas are there");
    }
}
