//! Programs whose buffers lie in a pool of a CUDA device's memory: the same results under every
//! policy, with pages that are mapped on demand and released when other sessions need their memory.

#[path = "../../support/products.rs"]
mod products;

use ndarray::{Array1, Array2};
use slabwise::memory::{MemoryConfig, Policy};
use slabwise::prelude::*;
use slabwise_cuda::fake::FakeDriver;

const ROWS: usize = 64;
const MIB: u64 = 1 << 20;

fn session(config: &MemoryConfig) -> Session {
    products::session(Device::Cuda(0), config)
}

#[test]
fn results_are_the_same_under_every_policy() {
    let Some(driver) = FakeDriver::install() else {
        return;
    };
    let x = products::input(ROWS);
    let planned = {
        let mut session = session(&MemoryConfig::default());
        let program = products::program(&mut session, ROWS);
        let [loss] = session.run(&program, (&x,)).expect("runs");
        loss.item().to_bits()
    };
    for policy in Policy::ALL {
        for preallocate in [None, Some(false)] {
            let before = driver.get("live_bytes");
            let mut session = session(&MemoryConfig {
                preallocate,
                ..MemoryConfig::with_policy(policy)
            });
            let program = products::program(&mut session, ROWS);
            for _ in 0..3 {
                let [loss] = session.run_dynamic(&program, (&x,)).expect("runs");
                assert_eq!(loss.item().to_bits(), planned, "{policy}");
            }
            // Pages of the reservation beside those of the pool.
            let held = driver.get("live_bytes") - before;
            session.reset_pool();
            assert_eq!(
                (
                    session.pool_statistics().bytes_in_use,
                    session.pool_statistics().pool_bytes
                ),
                (0, 0),
                "{policy}"
            );
            let is_paged = preallocate == Some(false)
                && matches!(policy, Policy::Tlsf | Policy::Bfc | Policy::Vmm);
            if is_paged || policy == Policy::Vmm {
                assert!(
                    driver.get("live_bytes") - before < held,
                    "{policy}: its pages went back"
                );
            }
        }
    }
}

#[test]
fn unused_pages_of_the_pool_are_released_to_other_sessions() {
    let Some(driver) = FakeDriver::install() else {
        return;
    };
    for policy in [Policy::Tlsf, Policy::Vmm] {
        let config = MemoryConfig {
            limit: Some(20 * MIB),
            preallocate: Some(false),
            ..MemoryConfig::with_policy(policy)
        };
        let mut session = session(&config);
        let trace = Trace::inference();
        let x = trace.input("x", F32, (1024, 512));
        let program = session
            .compile(&trace, [(x.exp() + x).sum()])
            .expect("compiles");
        session
            .run_dynamic(&program, (Array2::<f32>::zeros((1024, 512)),))
            .expect("runs");
        let pooled = session.pool_statistics().pool_bytes;
        assert!(pooled >= 4 * MIB, "{policy}: the pool keeps its bytes");
        let large = Array1::<f32>::from_elem((13 * MIB / 4) as usize, 7.0);
        let buffer = session
            .upload("large", &large)
            .expect("the pool has more than it needs");
        let left = session.pool_statistics().pool_bytes;
        assert!(
            left < pooled && driver.get("live_bytes") as u64 <= 20 * MIB,
            "{policy}: {left} of {pooled}"
        );
        assert!(
            session
                .download::<f32>(&buffer)
                .expect("it is there")
                .iter()
                .all(|v| *v == 7.0)
        );
        let more = session
            .upload("more", &large)
            .map(|_| ())
            .expect_err("it is more than there is")
            .to_string();
        assert!(
            more.contains("more needs 13.0 MiB") && more.contains("on cuda:0"),
            "{more}"
        );
        session.free(buffer).expect("it is there");
        let [sum] = session
            .run_dynamic(&program, (Array2::<f32>::zeros((1024, 512)),))
            .expect("the pool grows again");
        assert_eq!(sum.item(), 1024.0 * 512.0);
    }
}

#[test]
fn the_variable_of_the_allocator_selects_mapped_pages() {
    let Some(_driver) = FakeDriver::install() else {
        return;
    };
    let (driver, functions) = slabwise_cuda::fake::build().expect("it was built before");
    let said = |preallocate: &str| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_slabwise-cuda-tests"));
        command.args([
            "bench", "mlp", "--batch", "2", "--steps", "1", "--device", "cuda:0",
        ]);
        command
            .env("SLABWISE_LIBCUDA", &driver)
            .env("SLABWISE_EMULATED", &functions);
        command
            .env("SLABWISE_ALLOCATOR", "vmm")
            .env("SLABWISE_PREALLOCATE", preallocate);
        let output = command.output().expect("it starts");
        (
            output.status.success(),
            String::from_utf8_lossy(&output.stderr).into_owned(),
        )
    };
    let (worked, errors) = said("0");
    assert!(worked, "{errors}");
    let (worked, errors) = said("1");
    assert!(
        !worked && errors.contains("SLABWISE_ALLOCATOR") && errors.contains("SLABWISE_PREALLOCATE"),
        "{errors}"
    );
}
