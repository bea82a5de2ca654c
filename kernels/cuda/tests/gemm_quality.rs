//! Properties that determine the speed of products, tested without a device: the compiler's
//! registers and spills, and banks of shared memory.

mod common;
mod products;

use common::TARGET;
use common::machine_code::{multiply_add_share, tensor_share};
use products::{Zeros, contiguous, matmul, plain, quantized, strided, typed};
use slabwise_cuda::compiler::Compiler;
use slabwise_cuda::emulator::{Check, Emulator, Order, available};
use slabwise_cuda::nvrtc::{self, Program, Usage};
use slabwise_cuda::{Candidate, Description, Dispatch, Function, PRELUDE, Target, candidates};
use slabwise_kernels::dtype::DType;
use slabwise_kernels::size::{Env, Size};
use slabwise_kernels::spec::{Body, Conv2d, ConvKind, Spec};

/// Whether there is a compiler; prints a line if not.
fn compiler() -> bool {
    match nvrtc::version() {
        Ok(_) => true,
        Err(e) => {
            assert!(std::env::var_os("CI").is_none(), "{e}");
            eprintln!("skipped: {e}");
            false
        }
    }
}

/// A convolution of this type, whose result has `out` × `out` positions, with a kernel of `k` × `k`
/// and strides of 1 or 2. Windows of 2 × 2 by 2 lie beside each other.
fn convolution(kind: ConvKind, dtype: DType, [out, k, stride]: [usize; 3]) -> Spec {
    let size = |n: usize| Size::fixed(n as i64);
    let (n, ci, co, hw) = (32, 64, 128, out * stride);
    let (image, weight, result) = ([n, ci, hw, hw], [co, ci, k, k], [n, co, out, out]);
    let [a, b, out_space] = match kind {
        ConvKind::Forward => [image, weight, result],
        ConvKind::InputGrad => [result, weight, image],
        ConvKind::WeightGrad => [image, result, weight],
    };
    let pad = if k == stride { 0 } else { k / 2 };
    let body = Conv2d {
        kind,
        n: size(n),
        ci: size(ci),
        co: size(co),
        hw: [size(hw); 2],
        ohw: [size(out); 2],
        k: [k; 2],
        stride: [stride; 2],
        pad: [pad; 2],
        dilation: [1; 2],
        groups: 1,
        a: typed(dtype, 0, &contiguous(&a)),
        b: typed(dtype, 0, &contiguous(&b)),
        prologue: None,
        exact: false,
    };
    let result = typed(DType::F32, 0, &contiguous(&out_space));
    plain(Body::Conv2d(body), &out_space, result)
}

fn square(dtype: DType, n: usize, a: [usize; 2], b: [usize; 2]) -> Spec {
    matmul(&[n, n], n, typed(dtype, 0, &a), typed(dtype, 0, &b))
}

/// The multiplying function of each of these kernels.
fn kernels(spec: &Spec, target: &Target, names: &[&str]) -> Vec<Function> {
    let list: Vec<Candidate> = candidates(spec, &Env::default(), target).expect("a product");
    let find = |name: &&str| {
        let found = list
            .iter()
            .find(|c| c.name.split(' ').next() == Some(name))
            .unwrap_or_else(|| panic!("{name} among {list:?}"));
        found.lowered.functions[0].clone()
    };
    names.iter().map(find).collect()
}

/// The kernels of large products and convolutions keep their accumulators in registers on every
/// architecture.
#[test]
fn hot_kernels_do_not_spill() {
    if !compiler() {
        return;
    }
    let n = 4096;
    let device = Target {
        multiprocessors: 108,
        shared_bytes_max: 163 << 10,
        ..TARGET
    };
    let tensor = Target {
        tf32: true,
        ..device
    };
    let mut functions = Vec::new();
    functions.extend(kernels(
        &square(DType::F32, n, [n, 1], [n, 1]),
        &device,
        &["gemm_128x128", "gemm_64x64"],
    ));
    for kind in [ConvKind::Forward, ConvKind::WeightGrad] {
        functions.extend(kernels(
            &convolution(kind, DType::F32, [56, 3, 1]),
            &device,
            &["gemm_128x128", "gemm_64x128"],
        ));
    }
    functions.extend(kernels(
        &square(DType::BF16, n, [n, 1], [n, 1]),
        &tensor,
        &["gemm_bf16_128x256", "gemm_bf16_128x128"],
    ));
    functions.extend(kernels(
        &square(DType::F16, n, [n, 1], [1, n]),
        &tensor,
        &["gemm_f16_128x128"],
    ));
    functions.extend(kernels(
        &square(DType::F32, n, [1, n], [n, 1]),
        &tensor,
        &["gemm_tf32_128x128"],
    ));
    let spill = |usage: &&Usage| usage.spill_bytes > 0 || usage.stack_bytes > 0;
    // A compiler older than 12.8 makes PTX for a device of sm_100.
    let is_known = |sm: &u32| nvrtc::architecture(*sm) == Ok(nvrtc::Architecture::Machine(*sm));
    assert!(is_known(&80) && is_known(&90));
    for sm in [80, 90, 100].into_iter().filter(is_known) {
        // The largest tiles everywhere; the rest once.
        let some = if sm == 80 {
            &functions[..]
        } else {
            &functions[..2]
        };
        let made = nvrtc::compile(&Program::new(PRELUDE, some, sm), None)
            .unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(made.usage.len(), some.len(), "sm_{sm}: {:?}", made.usage);
        let spilled: Vec<&Usage> = made.usage.iter().filter(spill).collect();
        assert!(spilled.is_empty(), "sm_{sm}: {spilled:?}");
    }
}

/// A kernel on tensor cores of whose instructions in a turn at least `least` in 10,000 are
/// multiplications.
struct Claim {
    label: String,
    function: Function,
    least: usize,
}

impl Claim {
    fn new(least: usize, spec: &Spec, target: &Target, name: &str, label: &str) -> Self {
        let [function] = kernels(spec, target, &[name]).try_into().expect("one name");
        Claim {
            label: format!("{label}, {name}"),
            function,
            least,
        }
    }
}

/// The claims that do not hold, one per line. Fails if a kernel spills.
fn refuted(claims: &[Claim], sm: u32) -> String {
    let programs: Vec<Program> = claims
        .iter()
        .map(|claim| Program::new(PRELUDE, [&claim.function], sm))
        .collect();
    let made = Compiler::default().compile(None, &programs);
    let made = made.unwrap_or_else(|e| panic!("{e}"));
    let mut low = Vec::new();
    for (claim, cubin) in claims.iter().zip(&made) {
        let spilled = cubin.usage.iter().any(|usage| usage.spill_bytes > 0);
        assert!(!spilled, "{}: {:?}", claim.label, cubin.usage);
        let [tensor, all] = tensor_share(&cubin.image, &claim.function.name);
        if 10_000 * tensor < claim.least * all {
            low.push(format!("{}: {tensor} of {all}", claim.label));
        }
    }
    low.join("\n")
}

/// The loops of products of one row, which have to keep up with memory: an H100 reads about 14 bytes in
/// a cycle of a multiprocessor, which issues four instructions for 32 lanes each in it. A lane
/// multiplies so many weights in a turn.
#[test]
fn products_of_one_row_issue_few_instructions() {
    if !compiler() {
        return;
    }
    let target = Description::nearest(90).target();
    let n = 4096;
    let floats = |dtype| {
        let a = strided(0, &[n, 1]);
        matmul(&[1, n], n, a, typed(dtype, 0, &[1, n]))
    };
    let packed = |bits| quantized([1, n, n], (bits, 32), Zeros::Packed);
    for (spec, name, weights, most) in [
        (floats(DType::F32), "gemv_dots_1x1", 4, 44),
        (floats(DType::F32), "gemv_dots_1x4", 16, 110),
        (floats(DType::BF16), "gemv_dots_1x1", 8, 92),
        (floats(DType::BF16), "gemv_dots_1x4", 32, 265),
        (packed(8), "gemv_8bits_1x4", 16, 170),
        (packed(4), "gemv_4bits_1x4", 32, 255),
        (packed(2), "gemv_2bits_1x4", 64, 400),
    ] {
        let [function] = kernels(&spec, &target, &[name])
            .try_into()
            .expect("one name");
        let program = Program::new(PRELUDE, [&function], 90);
        let made = nvrtc::compile(&program, None).unwrap_or_else(|e| panic!("{e}"));
        let [multiplied, all] = multiply_add_share(&made.image, &function.name);
        let label = format!("{name} of {}", spec.body.operands(&spec.dims)[1].0.dtype);
        assert!(
            all <= most,
            "{label}: {all} instructions for {weights} weights"
        );
        // Those of packed numbers have others in which they are decoded and scaled.
        assert!(multiplied * 2 >= weights, "{label}: {multiplied} of {all}");
    }
}

/// The same convolution, of operands whose channels are innermost.
fn channels_last(mut spec: Spec) -> Spec {
    let Body::Conv2d(conv) = &mut spec.body else {
        panic!("a convolution");
    };
    for operand in [&mut conv.a, &mut conv.b, &mut spec.operands[0]] {
        let fixed = |size: &Size| size.as_fixed().expect("known sizes");
        let strides: Vec<i64> = operand.strides.iter().map(fixed).collect();
        let channels = strides[0] / strides[1];
        let last = [strides[0], 1, strides[2] * channels, channels];
        operand.strides = last.map(Size::fixed).into_iter().collect();
    }
    spec
}

/// With channels innermost, tiles are moved in vectors, and of the instructions of a turn on tensor
/// cores more are multiplications: so many in 10,000 at least.
#[test]
fn convolutions_of_innermost_channels_multiply_most() {
    if !compiler() {
        return;
    }
    let device = Description::named("h100").expect("it is described");
    let target = Target {
        tf32: true,
        ..device.target()
    };
    use ConvKind::{Forward, InputGrad, WeightGrad};
    let classes = [
        (Forward, "bf16_128x256", 4180),
        (Forward, "bf16_128x128", 3650),
        (Forward, "bf16_128x64", 2400),
        (Forward, "bf16_64x64", 2230),
        (InputGrad, "bf16_128x256", 3420),
        (InputGrad, "bf16_128x128", 3090),
        (InputGrad, "bf16_64x128", 2110),
        (InputGrad, "bf16_64x64", 1830),
        (WeightGrad, "bf16_128x256", 2810),
        (WeightGrad, "bf16_128x128", 2750),
        (WeightGrad, "bf16_128x64", 2230),
        (WeightGrad, "bf16_64x64", 1600),
        (Forward, "tf32_128x256", 2940),
        (InputGrad, "tf32_128x256", 2470),
        (WeightGrad, "tf32_128x256", 1980),
    ];
    let claim = |(kind, tile, least): (ConvKind, &str, usize)| {
        let (dtype, name) = match tile.starts_with("tf32") {
            true => (DType::F32, format!("gemm_{tile}")),
            false => (DType::BF16, format!("gemm_{tile}")),
        };
        let spec = channels_last(convolution(kind, dtype, [56, 3, 1]));
        Claim::new(least, &spec, &target, &name, &format!("{kind:?}"))
    };
    let low = refuted(&classes.map(claim), target.sm);
    assert!(low.is_empty(), "{low}");
}

/// Of the instructions of a turn along the contracted axis of a convolution on tensor cores, at
/// least so many in 10,000 are multiplications: four times as many as the 32 of 953 with tf32 and
/// 32 of 1,260 with halves, which they were while each thread located each element by itself.
///
/// One claim in three is tested.
#[test]
fn convolutions_multiply_more_than_they_locate() {
    refute_convolutions(3);
}

#[test]
#[ignore = "compiles for a minute"]
fn all_convolutions_multiply_more_than_they_locate() {
    refute_convolutions(1);
}

/// Fails if one of each `period` claims does not hold.
fn refute_convolutions(period: usize) {
    if !compiler() {
        return;
    }
    let device = Description::named("h100").expect("it is described");
    let target = Target {
        tf32: true,
        ..device.target()
    };
    use ConvKind::{Forward, InputGrad, WeightGrad};
    let tf32 = [
        (Forward, "128x256", 2650),
        (Forward, "128x128", 2610),
        (Forward, "128x64", 1900),
        (Forward, "64x128", 1700),
        (Forward, "64x64", 1510),
        (InputGrad, "128x256", 2480),
        (InputGrad, "128x128", 2390),
        (InputGrad, "128x64", 1580),
        (InputGrad, "64x128", 1610),
        (InputGrad, "64x64", 1370),
        (WeightGrad, "128x256", 2430),
        (WeightGrad, "128x128", 2390),
        (WeightGrad, "128x64", 1700),
        (WeightGrad, "64x128", 1560),
        (WeightGrad, "64x64", 1390),
    ];
    let halves = [
        (Forward, "128x64", 2040),
        (Forward, "64x128", 1500),
        (Forward, "64x64", 1450),
        (InputGrad, "64x128", 1280),
        (InputGrad, "64x64", 1090),
        (WeightGrad, "128x64", 1670),
        (WeightGrad, "64x64", 1280),
    ];
    // Of larger kernels the smallest tiles, which locate the most. The gradient of a stem's image is
    // of no use.
    let tf32_small = [
        (Forward, "64x64", 1500),
        (WeightGrad, "64x64", 1390),
        (InputGrad, "64x64", 1350),
    ];
    let halves_small = [
        (Forward, "64x64", 1450),
        (WeightGrad, "64x64", 1280),
        (InputGrad, "64x64", 1090),
    ];
    // Windows that never cross the border.
    let tf32_apart = [
        (WeightGrad, "128x128", 2600),
        (WeightGrad, "128x64", 1850),
        (WeightGrad, "64x64", 1500),
    ];
    let halves_apart = [(WeightGrad, "128x64", 1880), (WeightGrad, "64x64", 1370)];
    // Of 14 × 14 positions, four form a vector, of 7 × 7 none: the gradients of the weight had the
    // smallest part.
    let halves_of_14 = [(WeightGrad, "128x64", 1620), (WeightGrad, "64x64", 1250)];
    let halves_of_7 = [(WeightGrad, "64x64", 1030)];
    let pointwise_of_14 = [
        (WeightGrad, "128x256", 4380),
        (WeightGrad, "128x128", 4100),
        (WeightGrad, "128x64", 2900),
        (WeightGrad, "64x128", 2900),
        (WeightGrad, "64x64", 2580),
    ];
    let pointwise_of_7 = [(WeightGrad, "64x64", 1300)];
    let pointwise_by_2 = [(WeightGrad, "128x64", 1820), (WeightGrad, "64x64", 1330)];
    let pointwise_by_2_of_7 = [(WeightGrad, "64x64", 1090)];
    // The two halves differ in the multiplication alone.
    let classes = [
        (DType::F32, "tf32", [56, 3, 1], &tf32[..]),
        (DType::F32, "tf32", [28, 3, 2], &tf32[..]),
        (DType::F32, "tf32", [28, 2, 2], &tf32_apart[..]),
        (DType::F32, "tf32", [56, 5, 1], &tf32_small[..]),
        (DType::F32, "tf32", [28, 7, 2], &tf32_small[..2]),
        (DType::BF16, "bf16", [56, 3, 1], &halves[..]),
        (DType::BF16, "bf16", [28, 3, 2], &halves[..]),
        (DType::BF16, "bf16", [28, 2, 2], &halves_apart[..]),
        (DType::BF16, "bf16", [56, 5, 1], &halves_small[..]),
        (DType::BF16, "bf16", [28, 7, 2], &halves_small[..2]),
        (DType::BF16, "bf16", [14, 3, 1], &halves_of_14[..]),
        (DType::BF16, "bf16", [14, 3, 2], &halves_of_14[..]),
        (DType::BF16, "bf16", [14, 5, 1], &halves_of_14[..]),
        (DType::BF16, "bf16", [7, 3, 1], &halves_of_7[..]),
        (DType::BF16, "bf16", [14, 1, 1], &pointwise_of_14[..]),
        (DType::BF16, "bf16", [7, 1, 1], &pointwise_of_7[..]),
        (DType::BF16, "bf16", [14, 1, 2], &pointwise_by_2[..]),
        (DType::BF16, "bf16", [7, 1, 2], &pointwise_by_2_of_7[..]),
        (DType::F16, "f16", [56, 3, 1], &halves[..]),
        (DType::F16, "f16", [14, 1, 1], &pointwise_of_14[..]),
    ];
    let (mut claims, mut count) = (Vec::new(), 0usize);
    for (dtype, short, [out, k, stride], families) in classes {
        for &(kind, tile, least) in families {
            let name = format!("gemm_{short}_{tile}");
            let spec = convolution(kind, dtype, [out, k, stride]);
            let label = format!("{kind:?} {k} x {k} by {stride} at {out} x {out}");
            if count % period == 0 {
                claims.push(Claim::new(least, &spec, &target, &name, &label));
            }
            count += 1;
        }
    }
    let low = refuted(&claims, target.sm);
    assert!(low.is_empty(), "{low}");
}

/// The number of cycles in which shared memory serves a warp's accesses of `width` bytes each, by
/// the model of 32 banks of 4 bytes: the lanes of 128 bytes are served at once, and words of one
/// bank one after the other.
fn turns(addresses: &[i32], width: usize) -> usize {
    let mut total = 0;
    for group in addresses.chunks(128 / width) {
        let mut words: Vec<i32> = group
            .iter()
            .flat_map(|&a| (0..width as i32).step_by(4).map(move |b| (a + b) / 4))
            .collect();
        words.sort_unstable();
        words.dedup();
        let in_bank = |bank: i32| words.iter().filter(|&&w| w % 32 == bank).count();
        total += (0..32).map(in_bank).max().unwrap_or(0);
    }
    total
}

/// Byte addresses of the 32 lanes by an expression over `lane`, evaluated by the source itself.
fn addresses(expressions: &[String]) -> Vec<Vec<i32>> {
    let source = |text: &str| {
        let body = format!(
            "const int lane = int(threadIdx.x);\nreinterpret_cast<int*>(p.w[0])[lane] = {text};\n"
        );
        Function::new(
            "addresses",
            &format!(
                "extern \"C\" __global__ void NAME(const __grid_constant__ Words<1> p) {{\n{body}}}\n"
            ),
        )
    };
    let functions: Vec<Function> = expressions.iter().map(|e| source(e)).collect();
    let emulator = Emulator::new(&functions, Check::Nothing).unwrap_or_else(|e| panic!("{e}"));
    let run = |function: &Function| {
        let mut lanes = vec![0i32; 32];
        let dispatch = Dispatch {
            function: 0,
            grid: [1; 3],
            block: [32, 1, 1],
            shared_bytes: 0,
            words: vec![],
        };
        // SAFETY: the function writes the 32 integers of `lanes`, which are used nowhere else.
        unsafe {
            emulator.launch(
                function,
                &dispatch,
                &[lanes.as_mut_ptr() as u64],
                Order::Forward,
            )
        }
        .unwrap_or_else(|e| panic!("{e}"));
        lanes
    };
    functions.iter().map(run).collect()
}

/// No two lanes of an access conflict in a bank, neither where fragments are read for the
/// multiplications nor where tiles are written.
#[test]
fn banks_do_not_conflict() {
    if !available() {
        return;
    }
    let mut accesses: Vec<(String, usize, usize)> = Vec::new();
    let mut access = |text: String, width: usize, best: usize| accesses.push((text, width, best));
    // Register tiles: reads of 4 rows or columns per lane, of which a warp shares most; writes of 4
    // neighbours, or transposed.
    access(
        "4 * Steps<128, 8>::at(RegisterTile<128, 128, 8, 8, 8, 4>::first_row(lane), 3)".into(),
        16,
        4,
    );
    access(
        "4 * Steps<128, 8>::at(RegisterTile<128, 128, 8, 8, 8, 4>::first_column(lane), 3)".into(),
        16,
        4,
    );
    access("4 * Steps<128, 8>::at(4 * lane, 5)".into(), 16, 4);
    access("4 * Steps<128, 8>::at(lane / 8, lane % 8)".into(), 4, 1);
    access(
        "4 * ((lane / 4) * RegisterTile<128, 128, 8, 8, 8, 4>::LEAD + lane % 4 * 4)".into(),
        16,
        4,
    );
    // Tensor tiles: `ldmatrix` reads eight rows of 16 bytes at once, four times; other fragments
    // are read by two neighbours, or one. Vectors of 16 bytes are written along rows, single
    // elements across or along them, and halves by vectors across the threads that loaded them.
    let fragments = |elem: &str,
                     layout: &str,
                     is_deep: bool,
                     is_first: bool,
                     first: i32,
                     kind: i32| {
        let bytes = if elem == "float" { 4 } else { 2 };
        format!(
            "{bytes} * Fragments<{elem}, {layout}, 64, {is_deep}, {is_first}>::place(lane, {first}, {kind})"
        )
    };
    for (elem, free, deep) in [("bf16", 128, 32), ("bf16", 64, 64), ("float", 64, 32)] {
        let layout = format!("DeepRows<{elem}, {free}, {deep}>");
        for kind in 0..2 {
            for is_first in [false, true] {
                access(fragments(elem, &layout, true, is_first, 32, kind), 16, 4);
            }
        }
        let bytes = if elem == "float" { 4 } else { 2 };
        let vector = 16 / bytes;
        let chunks = deep / vector;
        access(
            format!("{bytes} * {layout}::at(lane / {chunks}, lane % {chunks} * {vector})"),
            16,
            4,
        );
        access(format!("{bytes} * {layout}::at(5, lane % {deep})"), 4, 1);
        access(format!("{bytes} * {layout}::at(lane, {vector})"), 16, 4);
    }
    for free in [64, 128, 256] {
        let halves = format!("FreeRows<f16, {free}, 32>");
        let floats = format!("FreeRows<float, {free}, 16>");
        for is_first in [false, true] {
            for kind in 0..4 {
                access(fragments("f16", &halves, false, is_first, 0, kind), 16, 4);
            }
        }
        for kind in 0..2 {
            access(fragments("float", &floats, false, true, 32, kind), 8, 2);
        }
        for kind in 0..4 {
            access(fragments("float", &floats, false, false, 32, kind), 4, 1);
        }
        access(format!("2 * {halves}::at(16, lane)"), 16, 4);
        access(format!("4 * {floats}::at(32 + lane, 7)"), 4, 1);
    }
    // Results on their way to memory: two neighbours per lane.
    access(
        "4 * ((lane / 4) * TensorTile<bf16, 128, 128, 64, 64, 64, 4>::lead(false) + lane % 4 * 2)"
            .into(),
        8,
        2,
    );
    access(
        "4 * (lane % 4 * 2 * TensorTile<float, 128, 128, 64, 64, 64, 4>::lead(true) + lane / 4 * 2)"
            .into(),
        8,
        2,
    );
    // Attention: rows of both sides, scores on their way to the second product, its right operand.
    for (tile, last) in [
        ("AttentionFma<128, 64, 64, 8>", 8),
        ("AttentionFma<64, 32, 128, 16>", 16),
    ] {
        for row in ["row(0)", "score_column(0)"] {
            access(format!("4 * ({tile}::{row} * {tile}::LEAD + 4)"), 16, 4);
        }
        let passed = format!("{tile}::score_column(1) * {tile}::OWN_LEAD + lane / {last} * 8");
        access(format!("4 * ({passed})"), 16, 4);
        access(format!("4 * {tile}::result_column(4)"), 16, 4);
    }
    for width in [32, 64, 128] {
        let lead = format!("AttentionMma<float, 64, 32, {width}, 1>::LEAD");
        access(format!("4 * (lane % 16 * {lead} + lane / 16 * 4)"), 16, 4);
        let row = "(lane / 16 * 8 + lane % 8)";
        access(format!("4 * ({row} * {lead} + lane / 8 % 2 * 4)"), 16, 4);
        for next in 0..2 {
            access(
                format!("4 * ((lane % 4 * 2 + {next}) * {lead} + lane / 4)"),
                4,
                1,
            );
        }
    }
    for width in [32, 64, 128, 256] {
        let lead = format!("AttentionMma<bf16, 64, 32, {width}, 1>::LEAD");
        access(format!("2 * (lane % 16 * {lead} + lane / 16 * 8)"), 16, 4);
    }
    let lanes = addresses(&accesses.iter().map(|a| a.0.clone()).collect::<Vec<_>>());
    for ((text, width, best), lanes) in accesses.iter().zip(lanes) {
        assert!(
            turns(&lanes, *width) <= *best,
            "{text}: {} turns instead of {best}: {lanes:?}",
            turns(&lanes, *width)
        );
    }
    // The model itself sees a conflict.
    assert_eq!(
        turns(&(0..32).map(|lane| lane * 128).collect::<Vec<_>>(), 4),
        32
    );
    assert_eq!(
        turns(&(0..32).map(|lane| lane * 4).collect::<Vec<_>>(), 4),
        1
    );
}

/// The last block of a tile reads the sums of the others only after it has counted them, and past the
/// L1 cache; no load takes the path of data that is constant during the launch.
#[test]
fn sums_of_other_blocks_are_loaded_behind_the_counter() {
    if !compiler() {
        return;
    }
    let long = |dtype, m: usize, n: usize| {
        matmul(
            &[m, n],
            1 << 16,
            typed(dtype, 0, &[1 << 16, 1]),
            typed(dtype, 0, &[n, 1]),
        )
    };
    let specs = [
        long(DType::F32, 64, 64),
        long(DType::F32, 64, 4),
        long(DType::BF16, 128, 128),
        convolution(ConvKind::WeightGrad, DType::F32, [56, 3, 1]),
    ];
    let mut seen = 0;
    for spec in &specs {
        let list = candidates(spec, &Env::default(), &TARGET).expect("a product");
        for candidate in list.iter().filter(|c| c.name.ends_with("parts")).take(3) {
            let function = &candidate.lowered.functions[0];
            let ptx = nvrtc::ptx(&Program::new(PRELUDE, [function], 90)).expect("PTX");
            let (before, after) = ptx.split_once("atom.global.inc").unwrap_or_else(|| {
                panic!("{} has no counter", candidate.name);
            });
            assert!(
                !before.contains("ld.global.cg"),
                "{}: {before}",
                candidate.name
            );
            assert!(after.contains("ld.global.cg"), "{}", candidate.name);
            assert!(!ptx.contains("ld.global.nc"), "{}", candidate.name);
            let wait = before.find("griddepcontrol.wait").expect("it waits");
            assert!(!before[..wait].contains("ld.global"), "{}", candidate.name);
            seen += 1;
        }
    }
    assert!(seen > 3, "{seen}");
}
