//! Kernels of the user: the operands that are refused, and the memory that is accessed.

use std::panic::{AssertUnwindSafe, catch_unwind};

use slabwise_kernels::cpu::{Config, Isa, Kernel, Team};
use slabwise_kernels::custom::{CustomKernel, CustomRun};
use slabwise_kernels::dtype::DType;
use slabwise_kernels::memory::{Memory, Region};
use slabwise_kernels::size::{Env, Size};
use slabwise_kernels::spec::{Body, Custom, Dims, Operand, Spec};

/// A kernel over five elements, which are the input and the result.
fn spec(run: impl Fn(&mut CustomRun<'_>) + Send + Sync + 'static) -> Spec {
    let dims = Dims::from_slice(&[Size::fixed(5)]);
    let operand = |dtype| Operand::contiguous(dtype, &dims).expect("small");
    Spec {
        body: Body::Custom(Box::new(Custom {
            kernel: CustomKernel::new("own", [DType::I32], DType::U8, run),
            inputs: vec![(operand(DType::I32), dims.clone())],
            result: operand(DType::U8),
        })),
        dims,
        reduced: 0,
        operands: vec![],
        indices: vec![],
        code: vec![],
        stores: vec![],
    }
}

/// The kernel of a spec, or the message of its refusal.
fn prepared(change: impl FnOnce(&mut Custom, &mut Dims)) -> Result<Kernel, String> {
    let mut spec = spec(|run| {
        let x = run.input::<i32>(0);
        run.parts(2, |part, to: &mut [u8]| {
            assert_eq!(to.len(), [2, 2, 1][part]);
            for (k, to) in to.iter_mut().enumerate() {
                *to = u8::try_from(x[2 * part + k]).expect("a byte");
            }
        });
    });
    if let Body::Custom(custom) = &mut spec.body {
        change(custom, &mut spec.dims);
    }
    let config = Config {
        threads: 3,
        isa: Isa::Portable,
    };
    Kernel::new(spec, &Env::default(), &config).map_err(|error| error.to_string())
}

/// Runs a kernel on regions, of which the first holds these numbers; the bytes of the second one.
fn run(kernel: &Kernel, numbers: &[i32], regions: impl Fn([Region; 2]) -> [Region; 2]) -> Vec<u8> {
    let mut memory = Memory::new();
    let whole = [numbers.len() as u64 * 4, 5].map(|bytes| memory.reserve(bytes).expect("memory"));
    memory
        .elements_mut::<i32>(&whole[0])
        .copy_from_slice(numbers);
    let args = regions(whole);
    let (env, none) = (Env::default(), Region::default());
    let done = kernel.run(&mut memory, &args, &none, &env, &Team::new(3));
    done.expect("it cannot fail");
    memory.bytes(&whole[1]).to_vec()
}

#[test]
fn the_elements_of_regions_are_read_and_written() {
    let kernel = prepared(|_, _| {}).expect("a spec");
    assert_eq!(run(&kernel, &[1, 2, 3, 4, 5], |all| all), [1, 2, 3, 4, 5]);
    // A part of the region, by an offset.
    let kernel = prepared(|custom, _| custom.inputs[0].0.offset = Size::fixed(2));
    let kernel = kernel.expect("a spec");
    assert_eq!(
        run(&kernel, &[9, 9, 1, 2, 3, 4, 5], |all| all),
        [1, 2, 3, 4, 5]
    );
    let empty = prepared(|custom, dims| {
        custom.inputs[0].1[0] = Size::ZERO;
        dims[0] = Size::ZERO;
    });
    assert_eq!(run(&empty.expect("a spec"), &[], |all| all), [0; 5]);
}

#[test]
fn operands_that_are_not_the_kernels_are_refused() {
    let refused = |change: fn(&mut Custom, &mut Dims)| match prepared(change) {
        Ok(_) => panic!("it is accepted"),
        Err(message) => message,
    };
    let told = |text: String, part: &str| assert!(text.contains(part), "{part:?} not in {text}");
    told(
        refused(|custom, _| custom.inputs[0].0.dtype = DType::F32),
        "an input is f32",
    );
    told(
        refused(|custom, _| custom.result.dtype = DType::Bool),
        "the result is bool",
    );
    told(
        refused(|custom, _| custom.inputs[0].0.strides[0] = Size::fixed(2)),
        "not contiguous",
    );
    told(
        refused(|custom, _| custom.result.strides[0] = Size::fixed(2)),
        "not contiguous",
    );
    told(
        refused(|custom, _| custom.inputs.clear()),
        "\"own\" of [I32] to U8",
    );
}

#[test]
fn regions_that_are_too_small_or_overlap_are_refused() {
    let kernel = prepared(|_, _| {}).expect("a spec");
    let message = |numbers: &[i32], regions: fn([Region; 2]) -> [Region; 2]| {
        let run = catch_unwind(AssertUnwindSafe(|| run(&kernel, numbers, regions)));
        *run.expect_err("it panics")
            .downcast::<String>()
            .expect("a message")
    };
    let small = message(&[1, 2, 3, 4], |all| all);
    assert!(
        small.contains("argument 0 reaches 20 bytes of a region of 16"),
        "{small}"
    );
    let same = message(&[1, 2, 3, 4, 5], |all| [all[0], all[0]]);
    assert!(
        same.contains("argument 1 is written and overlaps argument 0"),
        "{same}"
    );
    let large = message(&[1, 2, 300, 4, 5], |all| all);
    assert!(large.starts_with("a byte"), "{large}");
}
