//! The emulator itself: it runs correct kernels, and catches each kind of mistake.

mod common;

use common::{Case, Choices, NO_FAULT, TARGET, sanitized};
use slabwise_cuda::emulator::{Check, Emulator, Order, available};
use slabwise_cuda::{Dispatch, Function, lower};
use slabwise_kernels::size::{Env, Size};
use slabwise_kernels::spec::{Body, Inst, Operand, Spec, Store};

/// A kernel of one or two words: the addresses of floats.
fn kernel(body: &str) -> Function {
    let declare = "float* const a = reinterpret_cast<float*>(p.w[0]);\nfloat* const b = reinterpret_cast<float*>(p.w[1]);\nconst int t = threadIdx.x;";
    Function::new(
        "test",
        &format!(
            "extern \"C\" __global__ void NAME(const __grid_constant__ Words<2> p) {{\n{declare}\n{body}\n}}\n"
        ),
    )
}

/// Kernels compiled together.
struct Kernels {
    emulator: Emulator,
    functions: Vec<Function>,
}

impl Kernels {
    fn new(bodies: &[&str]) -> Result<Kernels, String> {
        let functions: Vec<Function> = bodies.iter().map(|body| kernel(body)).collect();
        Ok(Kernels {
            emulator: Emulator::new(&functions, Check::Nothing).map_err(|e| e.to_string())?,
            functions,
        })
    }

    /// Runs one block of `threads` over two arrays of 256 floats; returns the second, or the error.
    fn run(&self, which: usize, threads: u32, order: Order) -> Result<Vec<f32>, String> {
        let mut a: Vec<f32> = (0..256).map(|i| i as f32).collect();
        let mut b = vec![0.0f32; 256];
        let dispatch = Dispatch {
            function: which,
            grid: [1; 3],
            block: [threads, 1, 1],
            shared_bytes: 4096,
            words: vec![],
        };
        let words = [a.as_mut_ptr() as u64, b.as_mut_ptr() as u64];
        // SAFETY: the kernels below stay inside of the arrays, which are used nowhere else.
        unsafe {
            self.emulator
                .launch(&self.functions[which], &dispatch, &words, order)
        }
        .map_err(|e| e.to_string())?;
        Ok(b)
    }

    /// Whether some order fails, differs from the others, or gives a NaN.
    fn is_caught(&self, which: usize, threads: u32) -> bool {
        let results: Vec<_> = Order::ALL
            .iter()
            .map(|&order| self.run(which, threads, order))
            .collect();
        results.iter().any(|r| match (r, &results[0]) {
            (Ok(values), Ok(first)) => values.iter().any(|x| x.is_nan()) || values != first,
            _ => true,
        })
    }
}

const REVERSED: &str =
    "__shared__ float s[128];\ns[t] = a[t];\n__syncthreads();\nb[t] = s[127 - t];";

#[test]
fn right_kernels_run_in_every_order() {
    if !available() {
        return;
    }
    let kernels = Kernels::new(&[
        REVERSED,
        "b[t] = __shfl_xor_sync(0xffffffffu, a[t], 1) + __shfl_down_sync(0xffffffffu, a[t], 2);",
        "b[t] = float(__popc(__ballot_sync(0xffffffffu, t % 3 == 0))) + 100.0f * __syncthreads_count(t < 40);",
        "SHARED_BYTES(float, s);
        copy_async<16>(s + 4 * t, a + 4 * t, t % 2 == 0);
        copy_async_commit();
        copy_async_wait<0>();
        __syncthreads();
        b[t] = s[t];",
    ])
    .expect("compiles");
    let expected: Vec<f32> = (0..256)
        .map(|i| if i < 128 { (127 - i) as f32 } else { 0.0 })
        .collect();
    for order in Order::ALL {
        assert_eq!(kernels.run(0, 128, order).as_ref(), Ok(&expected));
        let shuffled = kernels.run(1, 64, order).expect("runs");
        for (t, x) in shuffled.iter().enumerate().take(64) {
            let down = if t % 32 + 2 < 32 { t + 2 } else { t };
            assert_eq!(*x, ((t ^ 1) + down) as f32);
        }
        assert_eq!(kernels.run(2, 64, order).expect("runs")[..64], [4011.0; 64]);
        assert_eq!(
            kernels.run(3, 32, order).expect("runs")[..10],
            [0.0, 1.0, 2.0, 3.0, 0.0, 0.0, 0.0, 0.0, 8.0, 9.0]
        );
    }
}

#[test]
fn mistakes_are_caught() {
    if !available() {
        return;
    }
    let mistakes = [
        (
            "no barrier",
            "__shared__ float s[128];\ns[t] = a[t];\nb[t] = s[127 - t];",
            128,
        ),
        (
            "no second barrier",
            "__shared__ float s[128];\nfor (int i = 0; i < 2; ++i) {\ns[t] = a[t] + i;\n__syncthreads();\nb[t] += s[127 - t];\n}",
            128,
        ),
        (
            "shared memory never written",
            "__shared__ float s[128];\nif (t < 127) s[t] = a[t];\n__syncthreads();\nb[t] = s[t];",
            128,
        ),
        (
            "dynamic shared memory never written",
            "SHARED_BYTES(float, s);\nb[t] = s[t];",
            32,
        ),
        (
            "a barrier that not all reach",
            "if (t < 32) __syncthreads();\nelse if (t < 40) __syncwarp();\nb[t] = a[t];",
            64,
        ),
        (
            "a shuffle that not all reach",
            "if (t != 3) b[t] = __shfl_xor_sync(0xffffffffu, a[t], 1);\nelse __syncthreads();",
            32,
        ),
        (
            "a lane that has returned",
            "if (t == 3) return;\nb[t] = __shfl_xor_sync(0xffffffffu, a[t], 1);",
            32,
        ),
        (
            "a lane outside of its mask",
            "b[t] = __shfl_xor_sync(0xffffu, a[t], 1);",
            32,
        ),
        (
            "a misaligned vector",
            "const Vec<float, 4> v = load_vec<Vec<float, 4>>(a + 1);\nb[t] = v.v[0];",
            32,
        ),
        (
            "a copy not waited for",
            "SHARED_BYTES(float, s);\ncopy_async<4>(s + t, a + t, true);\ncopy_async_commit();\ncopy_async_wait<1>();\nb[t] = s[t];",
            32,
        ),
        ("two threads write one place", "b[0] = a[t];", 32),
    ];
    let bodies: Vec<&str> = mistakes
        .iter()
        .map(|(_, body, _)| *body)
        .chain([REVERSED])
        .collect();
    let kernels = Kernels::new(&bodies).expect("compiles");
    for (which, (what, _, threads)) in mistakes.iter().enumerate() {
        assert!(kernels.is_caught(which, *threads), "{what}");
    }
    assert!(!kernels.is_caught(mistakes.len(), 128), "a right kernel");
    let too_large = kernels
        .run(mistakes.len(), 2048, Order::Forward)
        .expect_err("too many threads");
    assert!(too_large.contains("1024 threads"), "{too_large}");
}

/// Products of tensor cores, against sums written out: operands as the PTX manual lays them out
/// over the warp.
#[test]
fn tensor_core_instructions_multiply() {
    if !available() {
        return;
    }
    // a is 16×16 of f16 in shared memory, b is 16×8, both loaded by ldmatrix; b as its rows,
    // transposed while it is loaded.
    let body = "
        __shared__ __align__(16) f16 x[16][24];
        __shared__ __align__(16) f16 y[16][8];
        for (int i = t; i < 256; i += 32) x[i / 16][i % 16] = narrow_f16(a[i] - 100.0f);
        for (int i = t; i < 128; i += 32) y[i / 8][i % 8] = narrow_f16(float(i % 7) - 3.0f);
        __syncwarp();
        unsigned ra[4], rb[2];
        ldmatrix_x4(ra, &x[t % 16][t / 16 * 8]);
        ldmatrix_x2_trans(rb, &y[t % 16][0]);
        float d[4] = {1.0f, 1.0f, 1.0f, 1.0f};
        mma_m16n8k16_f16(d, ra, rb);
        for (int e = 0; e < 4; ++e) b[(t / 4 + 8 * (e / 2)) * 8 + t % 4 * 2 + e % 2] = d[e];";
    let tf32 = "
        unsigned ra[4], rb[2];
        for (int r = 0; r < 4; ++r) ra[r] = round_tf32(a[(t / 4 + 8 * (r % 2)) * 8 + t % 4 + 4 * (r / 2)] - 50.0f);
        for (int r = 0; r < 2; ++r) rb[r] = round_tf32(float(((t % 4 + 4 * r) * 8 + t / 4) % 7) - 3.0f);
        float d[4] = {};
        mma_m16n8k8_tf32(d, ra, rb);
        for (int e = 0; e < 4; ++e) b[(t / 4 + 8 * (e / 2)) * 8 + t % 4 * 2 + e % 2] = d[e];";
    let kernels = Kernels::new(&[body, tf32]).expect("compiles");
    let got = kernels.run(0, 32, Order::Shuffled(3)).expect("runs");
    let got_tf32 = kernels.run(1, 32, Order::Forward).expect("runs");
    for i in 0..16 {
        for j in 0..8 {
            let y = |k: usize| ((k * 8 + j) % 7) as f32 - 3.0;
            let sum: f32 = (0..16).map(|k| ((i * 16 + k) as f32 - 100.0) * y(k)).sum();
            assert_eq!(got[i * 8 + j], 1.0 + sum, "f16 at {i}, {j}");
            let sum: f32 = (0..8).map(|k| ((i * 8 + k) as f32 - 50.0) * y(k)).sum();
            assert_eq!(got_tf32[i * 8 + j], sum, "tf32 at {i}, {j}");
        }
    }
}

/// y = x over 100 elements, where the kernel believes that there are `claimed`.
fn copy(claimed: i64) -> Spec {
    let operand = Operand {
        dtype: slabwise_kernels::dtype::DType::F32,
        offset: Size::ZERO,
        strides: [Size::ONE].into_iter().collect(),
    };
    Spec {
        body: Body::Loop,
        dims: [Size::fixed(claimed)].into_iter().collect(),
        reduced: 0,
        operands: vec![operand.clone(), operand],
        indices: vec![],
        code: vec![Inst::Load(0)],
        stores: vec![Store {
            value: 0,
            operand: 1,
        }],
    }
}

/// Runs in a separate process, which the test below starts with the sanitizer's library.
#[test]
#[ignore = "needs a preloaded library"]
fn addresses_child() {
    let lowered = lower(&copy(101), &Env::default(), &TARGET).expect("a copy");
    let emulator = Emulator::new(&lowered.functions, Check::Addresses).expect("compiles");
    let mut case = Case::new("copy", copy(101), &mut Choices::new(1));
    case.emulated(&lowered, &emulator, Order::Forward, NO_FAULT)
        .expect("a right kernel passes");
    // Another argument's memory is outside of this one, although both belong to the process.
    for short in [0, 1] {
        let mut case = case.clone();
        case.args[short].truncate(400);
        let error = case
            .emulated(&lowered, &emulator, Order::Forward, NO_FAULT)
            .expect_err("one element too many");
        assert!(error.contains("AddressSanitizer"), "{error}");
    }
    case.args[0].fill(0);
    case.emulated(&lowered, &emulator, Order::Forward, NO_FAULT)
        .expect("it goes on after a report");
}

#[test]
fn accesses_outside_of_arguments_are_caught() {
    if !available() {
        return;
    }
    sanitized("addresses_child");
}

#[test]
fn a_fault_keeps_guarded_kernels_from_writing() {
    if !available() {
        return;
    }
    let mut case = Case::new("copy", copy(100), &mut Choices::new(1));
    case.target.guarded = true;
    let lowered = lower(&case.spec, &case.bounds, &case.target).expect("a copy");
    let emulator = Emulator::new(&lowered.functions, Check::Nothing).expect("compiles");
    let (before, after) = (case.args.clone(), case.on_cpu().0);
    assert_ne!(before, after);
    assert_eq!(
        case.emulated(&lowered, &emulator, Order::Forward, NO_FAULT)
            .expect("runs")
            .0,
        after
    );
    assert_eq!(
        case.emulated(&lowered, &emulator, Order::Forward, 7 << 32)
            .expect("runs")
            .0,
        before
    );
}

#[test]
fn a_source_that_does_not_compile_says_why() {
    if !available() {
        return;
    }
    let Err(error) = Kernels::new(&["b[t] = nothing;"]) else {
        panic!("there is no such name")
    };
    assert!(
        error.contains("nothing") && error.contains(".cpp"),
        "{error}"
    );
}
