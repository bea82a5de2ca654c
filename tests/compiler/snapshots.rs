//! Snapshots of the program after each pass, as dumps show it. `UPDATE_EXPECT=1` writes them anew.

use std::fs;

use expect_test::{ExpectFile, expect_file};
use slabwise_kernels::cpu::Isa;
use slabwise_kernels::dtype::DType::{F32, I32};

use slabwise::Budget;
use slabwise::CompileOptions;
use slabwise::Tensor;
use slabwise::nn::{BatchNorm2d, Conv2d, Linear, MultiHeadAttention};
use slabwise::optim::Sgd;
use slabwise::{Device, Params, Session, Trace};
use slabwise_compiler::passes::PASSES;

/// The line of a dump without the bytes of the workspace, which depend on the machine.
fn portable(line: &str) -> String {
    match line.split_once(" · workspace ") {
        Some((before, after)) => match after.split_once(" · ") {
            Some((_, rest)) => format!("{before} · {rest}"),
            None => before.to_owned(),
        },
        None => line.to_owned(),
    }
}

/// Compares the texts of a dump, one after the other, with a file.
fn check(
    params: Params,
    trace: &Trace,
    output: Tensor<'_>,
    budget: Option<Budget>,
    expected: ExpectFile,
) {
    let folder = tempfile::tempdir().expect("a folder");
    let options = CompileOptions {
        isa: Some(Isa::Portable),
        ..CompileOptions::default()
    };
    let session = Session::new(Device::Cpu, params)
        .expect("a session")
        .with_threads(1)
        .with_options(options)
        .with_budget(budget)
        .with_dump(folder.path());
    session.plan(trace, [output]).expect("it is planned");
    let programs = fs::read_dir(folder.path()).expect("a dump");
    let mut files: Vec<_> = programs
        .flat_map(|program| fs::read_dir(program.expect("a folder").path()).expect("files"))
        .map(|file| file.expect("a file").path())
        .collect();
    files.sort();
    let mut text = String::new();
    for file in files {
        let name = file.file_name().expect("a name").to_string_lossy();
        let Some((_, pass)) = name.strip_suffix(".txt").and_then(|n| n.split_once('-')) else {
            continue;
        };
        assert!(
            PASSES.contains(&pass) || ["trace", "plan", "passes"].contains(&pass),
            "{pass}"
        );
        // Up to preparation a budget changes nothing.
        let is_early = budget.is_some() && &*name < "08";
        if pass != "passes" && !is_early {
            let own = fs::read_to_string(&file).expect("text");
            let lines: Vec<String> = own.lines().map(portable).collect();
            text += &format!("## {name}\n\n{}\n\n", lines.join("\n").trim_end());
        }
    }
    expected.assert_eq(&text);
}

#[test]
fn small_mlp() {
    let params = Params::seeded(0);
    let hidden = Linear::new(&params.root() / "hidden", 6, 5);
    let head = Linear::new(&params.root() / "head", 5, 3);
    let trace = Trace::training();
    let (x, labels) = (trace.input("x", F32, (4, 6)), trace.input("y", I32, (4,)));
    let loss = x.apply(&hidden).relu().apply(&head).cross_entropy(labels);
    trace.minimize(loss, Sgd::new(0.1));
    check(
        params,
        &trace,
        loss,
        None,
        expect_file!["snapshots/small_mlp.txt"],
    );
}

/// A convolution, a norm and an activation, trained: the activation is recomputed.
fn conv_block(budget: Option<Budget>, expected: ExpectFile) {
    let params = Params::seeded(0);
    let root = params.root();
    let first = Conv2d::new(&root / "first", 3, 16, 3).padding(1);
    let norm = BatchNorm2d::new(&root / "norm", 16);
    let second = Conv2d::new(&root / "second", 16, 16, 3).padding(1);
    let trace = Trace::training();
    let x = trace.input("x", F32, (4, 3, 16, 16));
    let y = x.apply(&first).apply(&norm).relu().apply(&second).relu();
    let loss = (y * y).mean();
    trace.minimize(loss, Sgd::new(0.1));
    check(params, &trace, loss, budget, expected);
}

#[test]
fn conv_block_without_budget() {
    conv_block(None, expect_file!["snapshots/conv_block.txt"]);
}

#[test]
fn conv_block_within_a_budget() {
    let budget = "75%".parse().expect("a budget");
    conv_block(
        Some(budget),
        expect_file!["snapshots/conv_block_within_a_budget.txt"],
    );
}

#[test]
fn attention_block() {
    let params = Params::seeded(0);
    let attention = MultiHeadAttention::new(&params.root() / "attention", 8, 2).causal();
    let trace = Trace::inference();
    let x = trace.input("x", F32, (2, 5, 8));
    let y = x + x.apply(&attention);
    check(
        params,
        &trace,
        y,
        None,
        expect_file!["snapshots/attention_block.txt"],
    );
}
