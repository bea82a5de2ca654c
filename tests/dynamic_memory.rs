//! Programs whose buffers lie in the pool: the same results under every policy, and an
//! out-of-memory report.

#[path = "support/products.rs"]
mod products;

use ndarray::Array2;
use slabwise::memory::{MemoryConfig, Policy};
use slabwise::prelude::*;
use slabwise::{Error, Program};

const ROWS: usize = 256;
const MIB: u64 = 1 << 20;

fn session(config: &MemoryConfig) -> Session {
    products::session(Device::Cpu, config)
}

fn loss(session: &mut Session, program: &Program<1>, x: &Array2<f32>) -> Result<u32> {
    let [loss] = session.run_dynamic(program, (x,))?;
    Ok(loss.item().to_bits())
}

#[test]
fn results_are_the_same_under_every_policy() {
    let x = products::input(ROWS);
    let planned = {
        let mut session = session(&MemoryConfig::default());
        let program = products::program(&mut session, ROWS);
        let [loss] = session.run(&program, (&x,)).expect("runs");
        loss.item().to_bits()
    };
    for policy in Policy::ALL {
        let mut session = session(&MemoryConfig::with_policy(policy));
        let program = products::program(&mut session, ROWS);
        for _ in 0..3 {
            assert_eq!(
                loss(&mut session, &program, &x).expect("runs"),
                planned,
                "{policy}"
            );
        }
        assert_eq!(session.pool_policy(), policy);
        session.reset_pool();
        assert_eq!(
            (
                session.pool_statistics().bytes_in_use,
                session.pool_statistics().pool_bytes
            ),
            (0, 0),
            "{policy}"
        );
    }
}

#[test]
fn a_step_that_does_not_fit_is_reported_and_the_session_goes_on() {
    let x = products::input(ROWS);
    let small = MemoryConfig {
        limit: Some(MIB / 2),
        ..MemoryConfig::with_policy(Policy::Tlsf)
    };
    let mut session = session(&small);
    let program = products::program(&mut session, ROWS);
    let Err(Error::Memory {
        program: name,
        report,
    }) = loss(&mut session, &program, &x)
    else {
        panic!("half a MiB is the input and one result; a product needs workspace as well")
    };
    assert_eq!(
        (&*name, report.capacity, report.in_use),
        ("products", MIB / 2, 2 * 4 * (ROWS * ROWS) as u64)
    );
    assert!(report.in_use + report.requested > report.capacity);
    let holder = report.holders.first().expect("something is in use");
    assert!(
        holder
            .tag
            .location
            .is_some_and(|at| at.file().ends_with("products.rs"))
    );
    assert!(
        report.holders.iter().any(|h| h
            .next_use
            .as_deref()
            .is_some_and(|next| next.starts_with("step "))),
        "{report}"
    );
    let text = report.to_string();
    assert!(
        text.contains("512.0 KiB")
            && text.contains("products.rs:")
            && text.contains("remedies: a limit"),
        "{text}"
    );
    // The failed run holds no memory; the planned run, and a larger pool, work.
    assert_eq!(session.pool_statistics().bytes_in_use, 0);
    let [planned] = session.run(&program, (&x,)).expect("the slab has room");
    let planned = planned.item().to_bits();
    let mut session = session
        .with_memory(&MemoryConfig {
            limit: Some(4 * MIB),
            ..small
        })
        .expect("settings that make sense");
    assert_eq!(loss(&mut session, &program, &x).expect("room"), planned);
    let live = session.pool().live_buffers();
    assert!(
        live.iter().all(|holder| &*holder.tag.name != "(no name)"),
        "tags outlive a change of pools: {live:?}"
    );
}

#[test]
fn invalid_settings_are_named() {
    let session = Session::new(Device::Cpu, Params::seeded(0)).expect("a session");
    let error = session
        .with_memory(&MemoryConfig {
            fraction: Some(2.0),
            ..MemoryConfig::default()
        })
        .err()
        .expect("nonsense");
    assert!(
        error.to_string().contains("SLABWISE_MEM_FRACTION"),
        "{error}"
    );
}

#[test]
fn inputs_in_buffers_take_no_blocks() {
    let trace = Trace::inference();
    let x = trace.input("x", F32, (1 << 16,));
    let most = |resident: bool| {
        let mut session = session(&MemoryConfig::default());
        let program = session.compile(&trace, [x.sum()]).expect("it compiles");
        let x = ndarray::Array1::<f32>::ones(1 << 16);
        let buffer = session.upload("x", &x).expect("uploads");
        let [sum] = match resident {
            true => session.run_dynamic(&program, (&buffer,)).expect("it runs"),
            false => session.run_dynamic(&program, (&x,)).expect("it runs"),
        };
        assert_eq!(sum.item(), 65536.0);
        session.pool_statistics().peak_bytes_in_use
    };
    let bytes = (1 << 16) * 4;
    assert_eq!(most(false), most(true) + bytes);
}
