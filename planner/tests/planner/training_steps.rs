//! Training steps like those of a runtime: the bound is reached, and the order and in-place
//! computation save bytes.

use crate::generate::{cnn, mlp};
use slabwise_planner::{Checked, Dag, Options, OrderPolicy, Plan, check, plan};

fn planned(dag: &Dag, options: Options) -> Checked<Plan> {
    check(dag, plan(dag, &options).expect("a valid dag")).expect("a valid plan")
}

fn steps() -> Vec<(&'static str, Dag)> {
    vec![
        ("mlp 64", mlp(64, &[784, 512, 256, 10])),
        ("mlp 256", mlp(256, &[784, 512, 256, 10])),
        ("deep mlp", mlp(32, &[100; 60])),
        ("uneven mlp", mlp(17, &[784, 33, 501, 7, 256, 64, 1000, 10])),
        ("cnn 64", cnn(64)),
        ("cnn 1", cnn(1)),
    ]
}

#[test]
fn every_choice_of_options_reaches_its_bound() {
    for (name, dag) in steps() {
        for order in [OrderPolicy::Program, OrderPolicy::MinPeak] {
            for in_place in [false, true] {
                let plan = planned(
                    &dag,
                    Options {
                        order,
                        in_place,
                        ..Options::default()
                    },
                );
                assert_eq!(
                    plan.height, plan.lower_bound,
                    "{name}, {order:?}, in place: {in_place}"
                );
            }
        }
    }
}

#[test]
fn order_and_in_place_computation_save_bytes() {
    for (name, dag) in steps() {
        let best = planned(&dag, Options::default());
        let program = planned(
            &dag,
            Options {
                order: OrderPolicy::Program,
                ..Options::default()
            },
        );
        let copied = planned(
            &dag,
            Options {
                in_place: false,
                ..Options::default()
            },
        );
        let apart = planned(
            &dag,
            Options {
                reuse: false,
                ..Options::default()
            },
        );
        assert!(
            best.height < program.height,
            "{name}: updating at once must beat updating at the end"
        );
        assert!(best.height <= copied.height, "{name}");
        assert!(copied.height < apart.height, "{name}");
        assert_eq!(apart.height, apart.without_reuse, "{name}");
        assert!(
            !best.reused.is_empty() && copied.reused.is_empty() && apart.reused.is_empty(),
            "{name}"
        );
    }
}

/// Activations of equal width: all of them live at the end of the forward pass, and the rest of the
/// step fits inside them.
#[test]
fn a_deep_network_needs_its_activations_and_little_more() {
    let (layers, batch, width) = (60, 32, 128);
    let dag = mlp(batch, &[width; 61]);
    let plan = planned(&dag, Options::default());
    let activation = batch * width * 4;
    let weights = width * width * 4;
    assert!(plan.height >= (layers + 1) * activation);
    assert!(
        plan.height <= (layers + 2) * activation + weights + 64 * 1024 + 64,
        "{}",
        plan.height
    );
}

#[test]
fn ten_thousand_tasks_are_planned() {
    let dag = mlp(2, &[64; 2000]);
    assert!(dag.tasks.len() > 9_000);
    let plan = planned(&dag, Options::default());
    assert_eq!(plan.height, plan.lower_bound);
}
