//! The products of whole training steps, layer by layer: `cargo bench -p slabwise-benches --bench
//! layers -- [MODEL [THREADS [ISA [exact]]]]`.
//!
//! For each distinct layer of a model and each of its products (of attention: the kernel and its
//! gradient): its number in a step, the fastest of several runs, and multiplications and additions per second; at the end the time of
//! all products of a step. `exact`: no convolution is filtered.

mod common;

use std::time::{Duration, Instant};

use common::*;
use slabwise_kernels::cpu::{Config, Isa, Kernel, Team};
use slabwise_kernels::memory::Memory;
use slabwise_kernels::size::{Env, Size};
use slabwise_kernels::spec::{
    Attention, AttentionGrad, Body, ConvKind, Matmul, Operand, Scores, Spec,
};

/// The time for which one product is repeated, and the least number of repetitions.
const BUDGET: Duration = Duration::from_millis(60);
const RUNS: usize = 5;

/// A layer, and how many of it a model has.
struct Layer {
    count: usize,
    kind: Kind,
}

enum Kind {
    /// Images, input and output channels, rows and columns, kernel, stride, groups.
    Conv([usize; 7]),
    /// Rows, columns, contracted.
    Matmul([usize; 3]),
    /// Causal attention: examples, heads, queries, elements of each.
    Attention([usize; 4]),
}

fn conv(count: usize, shape: [usize; 7]) -> Layer {
    Layer {
        count,
        kind: Kind::Conv(shape),
    }
}

fn linear(count: usize, m: usize, n: usize, k: usize) -> Layer {
    Layer {
        count,
        kind: Kind::Matmul([m, n, k]),
    }
}

fn attention(count: usize, shape: [usize; 4]) -> Layer {
    Layer {
        count,
        kind: Kind::Attention(shape),
    }
}

fn layers(model: &str) -> Vec<Layer> {
    match model {
        "resnet20" => vec![
            conv(1, [64, 3, 16, 32, 3, 1, 1]),
            conv(6, [64, 16, 16, 32, 3, 1, 1]),
            conv(1, [64, 16, 32, 32, 3, 2, 1]),
            conv(1, [64, 16, 32, 32, 1, 2, 1]),
            conv(5, [64, 32, 32, 16, 3, 1, 1]),
            conv(1, [64, 32, 64, 16, 3, 2, 1]),
            conv(1, [64, 32, 64, 16, 1, 2, 1]),
            conv(5, [64, 64, 64, 8, 3, 1, 1]),
            linear(1, 64, 10, 64),
        ],
        "resnet18" => vec![
            conv(1, [16, 3, 64, 64, 7, 2, 1]),
            conv(4, [16, 64, 64, 16, 3, 1, 1]),
            conv(1, [16, 64, 128, 16, 3, 2, 1]),
            conv(1, [16, 64, 128, 16, 1, 2, 1]),
            conv(3, [16, 128, 128, 8, 3, 1, 1]),
            conv(1, [16, 128, 256, 8, 3, 2, 1]),
            conv(1, [16, 128, 256, 8, 1, 2, 1]),
            conv(3, [16, 256, 256, 4, 3, 1, 1]),
            conv(1, [16, 256, 512, 4, 3, 2, 1]),
            conv(1, [16, 256, 512, 4, 1, 2, 1]),
            conv(3, [16, 512, 512, 2, 3, 1, 1]),
            linear(1, 16, 200, 512),
        ],
        // At batch 16 and 64 × 64, without the repetitions that differ little.
        "mobilenetv2" => vec![
            conv(1, [16, 3, 32, 64, 3, 2, 1]),
            conv(1, [16, 32, 32, 32, 3, 1, 32]),
            conv(1, [16, 16, 96, 32, 1, 1, 1]),
            conv(1, [16, 96, 96, 32, 3, 2, 96]),
            conv(1, [16, 96, 24, 16, 1, 1, 1]),
            conv(2, [16, 24, 144, 16, 1, 1, 1]),
            conv(1, [16, 144, 144, 16, 3, 1, 144]),
            conv(1, [16, 144, 144, 16, 3, 2, 144]),
            conv(3, [16, 32, 192, 8, 1, 1, 1]),
            conv(2, [16, 192, 192, 8, 3, 1, 192]),
            conv(7, [16, 64, 384, 4, 1, 1, 1]),
            conv(4, [16, 384, 384, 4, 3, 1, 384]),
            conv(3, [16, 960, 160, 2, 1, 1, 1]),
            conv(3, [16, 960, 960, 2, 3, 1, 960]),
            conv(1, [16, 320, 1280, 2, 1, 1, 1]),
        ],
        // Those of MobileNetV2 at 224 × 224 and 64 × 64, EfficientNet-B0 and ConvNeXt-T.
        "depthwise" => vec![
            conv(1, [8, 144, 144, 56, 3, 1, 144]),
            conv(1, [8, 192, 192, 28, 3, 1, 192]),
            conv(1, [8, 384, 384, 14, 3, 1, 384]),
            conv(1, [8, 960, 960, 7, 3, 1, 960]),
            conv(1, [8, 672, 672, 14, 5, 1, 672]),
            conv(1, [8, 1152, 1152, 7, 5, 1, 1152]),
            conv(1, [8, 384, 384, 14, 7, 1, 384]),
            conv(1, [8, 768, 768, 7, 7, 1, 768]),
            conv(1, [16, 192, 192, 8, 3, 1, 192]),
            conv(1, [16, 384, 384, 4, 3, 1, 384]),
            conv(1, [16, 960, 960, 2, 3, 1, 960]),
        ],
        "gpt" => vec![
            linear(4, 1024, 768, 256),
            linear(4, 1024, 256, 256),
            linear(4, 1024, 1024, 256),
            linear(4, 1024, 256, 1024),
            linear(1, 1024, 1024, 256),
            attention(4, [8, 4, 128, 64]),
        ],
        other => panic!("no model {other}: resnet20, resnet18, mobilenetv2, depthwise or gpt"),
    }
}

/// A product with the names of its operands, the elements of its arguments and its multiplications.
struct Case {
    name: String,
    direction: &'static str,
    spec: Spec,
    sizes: Vec<usize>,
    work: usize,
}

fn cases(kind: &Kind) -> Vec<Case> {
    match *kind {
        Kind::Conv([n, ci, co, hw, k, stride, groups]) => {
            let of = |kind, direction| {
                let conv = Convolution {
                    kind,
                    n,
                    ci,
                    co,
                    hw,
                    k,
                    stride,
                    groups,
                };
                let (spec, sizes) = conv.spec();
                let grouped = if groups > 1 {
                    format!(" /{groups}")
                } else {
                    String::new()
                };
                let name = format!("{n}×{ci}×{hw}² → {co}, {k}²/{stride}{grouped}");
                Case {
                    name,
                    direction,
                    spec,
                    sizes: sizes.to_vec(),
                    work: conv.work(),
                }
            };
            let image = (ci > 3).then(|| of(ConvKind::InputGrad, "input"));
            [of(ConvKind::Forward, "forward")]
                .into_iter()
                .chain(image)
                .chain([of(ConvKind::WeightGrad, "weight")])
                .collect()
        }
        Kind::Matmul([m, n, k]) => {
            let of = |direction, m: usize, n: usize, k: usize, transposed: [bool; 2]| {
                let operand = |rows: usize, columns: usize, transposed: bool| {
                    let mut operand = contiguous(&if transposed {
                        [columns, rows]
                    } else {
                        [rows, columns]
                    });
                    if transposed {
                        operand.strides.swap(0, 1);
                    }
                    operand
                };
                let body = Matmul {
                    in_order: true,
                    k: Size::fixed(k as i64),
                    a: operand(m, k, transposed[0]),
                    b: operand(k, n, transposed[1]),
                };
                Case {
                    name: format!("{m}×{k} · {k}×{n}"),
                    direction,
                    spec: plain(Body::Matmul(body), &[m, n]),
                    sizes: vec![m * k, k * n, m * n],
                    work: m * n * k,
                }
            };
            // The gradient of the left operand is dY·Bᵀ, that of the right one Aᵀ·dY.
            vec![
                of("forward", m, n, k, [false, false]),
                of("input", m, k, n, [false, true]),
                of("weight", k, n, m, [true, false]),
            ]
        }
        Kind::Attention(shape) => attentions(shape),
    }
}

/// Attention and its gradient; heads lie beside each other in rows, and queries, keys and values in
/// the rows of a joint projection.
fn attentions([batch, heads, queries, width]: [usize; 4]) -> Vec<Case> {
    let size = |n: usize| Size::fixed(n as i64);
    let rows = |part: usize, parts: usize| Operand {
        offset: size(part * heads * width),
        strides: [
            queries * parts * heads * width,
            width,
            parts * heads * width,
            1,
        ]
        .map(size)
        .into_iter()
        .collect(),
        ..contiguous(&[1])
    };
    let of = Attention {
        scores: Scores {
            scale: (width as f32).powf(-0.5),
            soft_cap: None,
            causal: true,
            window: None,
            past: 0,
            step: 1,
        },
        width: size(width),
        keys: size(queries),
        q: rows(0, 3),
        k: rows(1, 3),
        v: rows(2, 3),
        mask: None,
        past: None,
        result: rows(0, 1),
    };
    let gradient = AttentionGrad {
        of: of.clone(),
        queries: size(queries),
        dy: rows(0, 1),
        in_turns: true,
        gradients: Operand {
            strides: [3 * queries * heads * width, width, heads * width, 1]
                .map(size)
                .into_iter()
                .collect(),
            ..contiguous(&[1])
        },
    };
    let result = batch * heads * queries * width;
    // Multiply-adds of one product of the pairs that see each other.
    let pairs = batch * heads * width * queries * (queries + 1) / 2;
    let case = |direction, body, rows: usize, arguments: [usize; 2], products: usize| Case {
        name: format!("{batch}×{heads} heads of {queries}×{width}"),
        direction,
        spec: Spec {
            code: vec![],
            stores: vec![],
            operands: vec![],
            ..plain(body, &[batch, heads, rows, width])
        },
        sizes: [
            vec![3 * result; 3],
            vec![result; arguments[0]],
            vec![arguments[1] * result],
        ]
        .concat(),
        work: products * pairs,
    };
    vec![
        case("forward", Body::Attention(Box::new(of)), queries, [0, 1], 2),
        case(
            "gradient",
            Body::AttentionGrad(Box::new(gradient)),
            3 * queries,
            [2, 3],
            5,
        ),
    ]
}

/// Seconds of the fastest run.
fn fastest(case: &Case, isa: Isa, team: &Team, exact: bool) -> f64 {
    let config = Config {
        threads: team.threads(),
        isa,
    };
    let mut spec = case.spec.clone();
    if let Body::Conv2d(conv) = &mut spec.body {
        conv.exact = exact;
    }
    let kernel = Kernel::new(spec, &Env::default(), &config).expect("a valid spec");
    let mut memory = Memory::new();
    let args = filled(&mut memory, &case.sizes);
    let workspace = memory.reserve(kernel.workspace()).expect("memory");
    let (start, mut best, mut runs) = (Instant::now(), f64::INFINITY, 0);
    while runs < RUNS || start.elapsed() < BUDGET {
        let before = Instant::now();
        kernel
            .run(&mut memory, &args, &workspace, &Env::default(), team)
            .expect("no index to be out of range");
        best = best.min(before.elapsed().as_secs_f64());
        runs += 1;
    }
    best
}

fn main() {
    let args: Vec<String> = std::env::args()
        .skip(1)
        .filter(|a| !a.starts_with('-'))
        .collect();
    let models = args
        .first()
        .map_or(vec!["resnet20", "resnet18", "mobilenetv2", "gpt"], |m| {
            vec![m]
        });
    let team = Team::new(
        args.get(1)
            .map_or(2, |t| t.parse().expect("a number of threads")),
    );
    let isa = match args.get(2) {
        Some(name) => Isa::available()
            .into_iter()
            .find(|i| i.to_string() == *name)
            .expect("an instruction set of this CPU"),
        None => Isa::detect(),
    };
    let exact = args.get(3).is_some_and(|word| word == "exact");
    for model in models {
        println!("{model}, {} threads, {isa}", team.threads());
        let mut total = [0.0; 2];
        for layer in layers(model) {
            for case in cases(&layer.kind) {
                let (seconds, flops) = (fastest(&case, isa, &team, exact), 2.0 * case.work as f64);
                let (ms, count) = (seconds * 1e3, layer.count as f64);
                println!(
                    "{count:2} × {:36} {:8} {ms:9.3} ms {:8.1} GFLOP/s {:9.2} ms a step",
                    case.name,
                    case.direction,
                    flops / seconds / 1e9,
                    ms * count
                );
                total = [total[0] + ms * count, total[1] + flops * count];
            }
        }
        println!(
            "{:.2} GFLOP, {:.2} ms, {:.1} GFLOP/s\n",
            total[1] / 1e9,
            total[0],
            total[1] / total[0] / 1e6
        );
    }
}
