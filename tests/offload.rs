//! Values offloaded to the host come back unchanged: results are the same bits, and the budget is
//! met.

mod support;

use slabwise::nn::{BatchNorm2d, Conv2d, ConvTranspose2d, Linear};
use slabwise::optim::AdamW;
use slabwise::prelude::*;
use slabwise::{BudgetReport, CompileOptions, Error};
use support::networks::{Trained, WIDTH, examples, quick, train, train_with};

/// A link fast enough that steps hardly wait for copies.
fn fast() -> Offload {
    Offload::new(Bytes(1 << 50))
}

fn kept(result: Result<Trained>) -> Option<Trained> {
    match result {
        Ok(trained) => Some(trained),
        Err(Error::Budget {
            budget,
            needed,
            floor,
            ..
        }) => {
            assert!(
                budget < needed && floor <= needed,
                "{budget} {floor} {needed}"
            );
            None
        }
        Err(other) => panic!("{other}"),
    }
}

/// Asserts that a program's run was as planned.
fn assert_as_planned(trained: &Trained, room: u64) {
    let plan = trained.program.plan();
    assert!(plan.slab_bytes() <= room, "{plan}");
    assert_eq!(
        trained.session.last_run().peak_slab_bytes,
        plan.slab_bytes(),
        "{plan}"
    );
    assert_eq!(trained.session.slab_bytes(), plan.slab_bytes());
    assert_eq!(trained.session.host_bytes(), plan.host_bytes());
}

#[test]
fn half_of_the_slab_trains_to_the_same_weights_with_any_link() {
    let sizes = [2048, 12, 3];
    let all = train(Budget::Unlimited, sizes, None).expect("it compiles");
    let once = all.program.plan().slab_bytes();
    let mut ways = Vec::new();
    for link in
        ["1000TB/s", "12GB/s", "1B/s"].map(|speed| speed.parse::<Offload>().expect("a link"))
    {
        let half = train_with(
            |s| s.with_budget(Budget::Fraction(0.5)).with_offload(link),
            sizes,
            None,
        )
        .expect("it fits");
        assert_as_planned(&half, once / 2);
        assert_eq!(half.losses, all.losses);
        assert!(half.weights == all.weights, "weights differ over {link:?}");
        let BudgetReport {
            tasks,
            offloaded: sent,
            overhead,
            ..
        } = half.program.plan().budget_report().clone();
        ways.push((tasks.len(), sent.len(), overhead));
        if !sent.is_empty() {
            let shown = half.program.plan().to_string();
            assert!(
                shown.contains("offload") && shown.contains("host") && shown.contains("copies"),
                "{shown}"
            );
            assert!(
                half.program.plan().kernels() < half.program.plan().steps().count(),
                "copies are steps and no kernels"
            );
        }
    }
    // With the fastest link nothing is recomputed, with the slowest nothing is offloaded, and time
    // grows in between.
    assert!(
        ways[0].0 == 0 && ways[0].1 > 0 && ways[2].0 > 0 && ways[2].1 == 0,
        "{ways:?}"
    );
    assert!(
        ways.windows(2).all(|two| two[0].2 <= two[1].2 + 1e-9),
        "{ways:?}"
    );
}

#[test]
fn random_networks_train_to_the_same_bits_within_any_budget_with_any_link() {
    let (mut sent, mut programs) = (0, 0);
    for seed in 0..8 {
        let sizes = [512, 4 + seed % 5, 3];
        let all = train(Budget::Unlimited, sizes, Some(seed)).expect("it compiles");
        let once = all.program.plan().slab_bytes();
        let fraction = [0.85, 0.7, 0.6, 0.5][seed % 4];
        let speed = Bytes(1 << [50, 34, 32][seed % 3]);
        let check_memory = seed % 2 == 0;
        let options = CompileOptions {
            check_memory,
            ..quick()
        };
        let open = |s: Session| {
            s.with_budget(Budget::Fraction(fraction))
                .with_offload(Offload::new(speed))
                .with_options(options)
        };
        let Some(within) = kept(train_with(open, sizes, Some(seed))) else {
            continue;
        };
        // Guards take additional bytes.
        assert_as_planned(
            &within,
            if check_memory {
                u64::MAX
            } else {
                (once as f64 * fraction) as u64
            },
        );
        assert_eq!(within.losses, all.losses, "network {seed}");
        assert!(
            within.weights == all.weights,
            "network {seed}: weights differ"
        );
        programs += 1;
        sent += within.program.plan().budget_report().offloaded.len();
    }
    assert!(
        programs >= 4 && sent >= 5,
        "{sent} sent in {programs} programs"
    );
}

#[test]
fn the_host_has_a_limit_and_a_budget_a_lower_bound() {
    let sizes = [2048, 12, 0];
    let once = train(Budget::Unlimited, sizes, None)
        .expect("it compiles")
        .program
        .plan()
        .slab_bytes();
    let limit = Bytes(once / 8);
    let within =
        |budget, offload| train_with(|s| s.with_budget(budget).with_offload(offload), sizes, None);
    let some = within(Budget::Fraction(0.5), fast().with_host_bytes(limit)).expect("it fits");
    assert!(some.program.plan().host_bytes() <= limit.0);
    // Without host memory the plan is the same as without a link.
    let none = within(Budget::Fraction(0.5), fast().with_host_bytes(Bytes(0))).expect("it fits");
    let BudgetReport {
        tasks,
        offloaded: sent,
        ..
    } = none.program.plan().budget_report();
    assert!(sent.is_empty() && !tasks.is_empty());
    assert!(kept(within(Budget::Fraction(0.01), fast())).is_none());
    // Without a budget nothing is offloaded.
    let free = within(Budget::Unlimited, fast()).expect("it compiles");
    assert_eq!(
        (free.program.plan().slab_bytes(), free.session.host_bytes()),
        (once, 0)
    );
}

/// Where workspaces take most of a slab, the smallest of them are tried with a link, too: it makes no
/// budget fail that is kept without one.
#[test]
fn a_link_makes_no_budget_fail() {
    let compiled = |offload: Option<Offload>| -> Result<(u64, u64)> {
        let params = Params::seeded(7);
        let root = &params.root();
        let down = [
            Conv2d::new(root / "a", 1, 8, 3).stride(2).padding(1),
            Conv2d::new(root / "b", 8, 12, 3).stride(2).padding(1),
        ];
        let norm = BatchNorm2d::new(root / "norm", 12);
        let (code, wide) = (
            Linear::new(root / "code", 192, 6),
            Linear::new(root / "wide", 6, 192),
        );
        let up = [
            ConvTranspose2d::new(root / "c", 12, 8, 4)
                .stride(2)
                .padding(1),
            ConvTranspose2d::new(root / "d", 8, 1, 4)
                .stride(2)
                .padding(1),
        ];
        let mut session = Session::new(Device::Cpu, params)?
            .with_threads(2)
            .with_budget(Budget::Fraction(0.6));
        if let Some(offload) = offload {
            session = session.with_offload(offload);
        }
        let trace = Trace::training();
        let x = trace.input("x", F32, (48, 1, 16, 16));
        let h = x.apply(&down[0]).silu().apply(&down[1]).apply(&norm).relu();
        let h = h.flatten(1).apply(&code).apply(&wide).relu();
        let y = h.reshape((48, 12, 4, 4)).apply(&up[0]).gelu().apply(&up[1]);
        let loss = y.mse(x);
        trace.minimize(loss, AdamW::new(1e-2));
        let program = session.compile(&trace, [loss])?;
        let report = program.plan().budget_report();
        Ok((session.slab_bytes(), report.once))
    };
    let (without, once) = compiled(None).expect("the budget is kept");
    let (with, _) = compiled(Some(fast())).expect("it is kept with a link, too");
    assert!(
        without.max(with) as f64 <= 0.6 * once as f64,
        "{without} {with} {once}"
    );
}

/// A run that fails midway leaves no copy pending and no weight changed; a session may be dropped
/// at any time.
#[test]
fn a_run_that_fails_leaves_a_session_that_trains_on() {
    const BATCH: usize = 2048;
    let open = |s: Session| s.with_budget(Budget::Fraction(0.5)).with_offload(fast());
    let mut trained = train_with(open, [BATCH, 12, 1], None).expect("it fits");
    let whole = train_with(open, [BATCH, 12, 3], None).expect("it fits");
    let (x, labels) = examples(BATCH);
    let mut wrong = labels.clone();
    wrong[BATCH - 1] = WIDTH as i32;
    for _ in 0..2 {
        let failed = trained.session.run(&trained.program, (&x, &wrong)).err();
        assert!(matches!(failed, Some(Error::Data { .. })), "{failed:?}");
    }
    // With separate buffers the same kernels give the same results.
    let second = trained
        .session
        .run_dynamic(&trained.program, (&x, &labels))
        .expect("a step")[0]
        .item();
    let third = trained
        .session
        .run(&trained.program, (&x, &labels))
        .expect("a step")[0]
        .item();
    assert_eq!([second, third].map(f32::to_bits), whole.losses[1..]);
    // Resident inputs are read, and offloaded, in place.
    let mut again = train_with(open, [BATCH, 12, 1], None).expect("it fits");
    let (x, labels) = (
        again.session.upload("x", &x).expect("room"),
        again.session.upload("labels", &labels).expect("room"),
    );
    let losses = [(); 2].map(|()| {
        again
            .session
            .run(&again.program, (&x, &labels))
            .expect("a step")[0]
            .item()
            .to_bits()
    });
    assert_eq!(losses, whole.losses[1..]);
}
