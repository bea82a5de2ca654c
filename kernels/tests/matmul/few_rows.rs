//! Products of few rows whose sums need no order, against double precision.

use half::{bf16, f16};

use super::*;

/// An element of a buffer of words, as numbers of a type.
fn element(words: &[f32], at: usize, dtype: DType) -> f32 {
    let half = || (words[at / 2].to_bits() >> (16 * (at % 2))) as u16;
    match dtype {
        DType::F16 => f16::from_bits(half()).to_f32(),
        DType::BF16 => bf16::from_bits(half()).to_f32(),
        _ => words[at],
    }
}

/// Words that hold `count` numbers of a type.
fn words(random: &mut Random, count: usize, dtype: DType) -> Vec<f32> {
    let bits = |random: &mut Random| match dtype {
        DType::F16 => u32::from(f16::from_f32(random.float()).to_bits()),
        _ => u32::from(bf16::from_f32(random.float()).to_bits()),
    };
    match dtype {
        DType::F32 => random.floats(count),
        _ => (0..count.div_ceil(2))
            .map(|_| f32::from_bits(bits(random) | bits(random) << 16))
            .collect(),
    }
}

/// Every element of a product of `m` rows, or of one column of so many rows, with a right operand of
/// a type whose columns are apart.
fn check(random: &mut Random, teams: &[Team], [m, n, k]: [usize; 3], dtype: DType, column: bool) {
    let apart = (k + random.of(&[0, 0, 2, 16])) as i64;
    let offset = 2 * random.int(0, 2) as i64;
    // A row of the left operand has its steps side by side or apart.
    let (row, step) = random.of(&[(k as i64, 1), (2 * k as i64 + 1, 2), (1, m as i64)]);
    let left = operand(random.int(0, 2) as i64, &[row, step]);
    let right = Operand {
        dtype,
        ..operand(offset, &[1, apart])
    };
    let swapped = |operand: &Operand| Operand {
        strides: operand.strides.iter().rev().copied().collect(),
        ..operand.clone()
    };
    let (dims, a, b) = match column {
        true => ([n, m], swapped(&right), swapped(&left)),
        false => ([m, n], left.clone(), right.clone()),
    };
    let bias = random.int(0, 1) == 1;
    let mut spec = plain(&dims, k, a, b);
    let Body::Matmul(body) = &mut spec.body else {
        unreachable!()
    };
    body.in_order = false;
    if bias {
        spec.operands.insert(0, operand(0, &[0, 1]));
        spec.code
            .extend([Inst::Load(0), Inst::Op(ScalarOp::Add, [0, 1, 0])]);
        spec.stores[0] = Store {
            value: 2,
            operand: 1,
        };
    }
    let left_len = left.extent(&[m, k].map(|n| Size::fixed(n as i64)), &Env::default());
    let right_len = right.extent(&[k, n].map(|n| Size::fixed(n as i64)), &Env::default());
    let left_data = random.floats(left_len as usize);
    let right_data = words(random, right_len as usize, dtype);
    let bias_data = random.floats(dims[1]);
    let mut args = match column {
        true => vec![right_data.clone(), left_data.clone()],
        false => vec![left_data.clone(), right_data.clone()],
    };
    args.extend(bias.then(|| bias_data.clone()));
    args.push(vec![f32::NAN; m * n]);
    let env = Env::default();
    for (isa, results) in run_all(&spec, &env, &env, teams, &args) {
        let result = results.last().expect("a result");
        for (i, j) in (0..m).flat_map(|i| (0..n).map(move |j| (i, j))) {
            let term = |step_at: usize| {
                let at = left.offset.at(&env) + i as i64 * row + step_at as i64 * step;
                let right = (offset + j as i64 * apart) as usize + step_at;
                let right = element(&right_data, right, dtype);
                f64::from(left_data[at as usize]) * f64::from(right)
            };
            let (sum, scale) = (0..k).fold((0.0, 0.0), |(sum, scale), step| {
                (sum + term(step), scale + term(step).abs())
            });
            let (row, column) = if column { (j, i) } else { (i, j) };
            let bias = if bias {
                f64::from(bias_data[column])
            } else {
                0.0
            };
            let got = result[row * dims[1] + column];
            assert_sum(got, sum + bias, scale + bias.abs(), k + 1, &|| {
                format!("{isa} {dims:?} k {k} of {dtype} at {row}, {column}")
            });
        }
    }
}

#[test]
fn products_of_few_rows() {
    let (mut random, teams) = (Random(0x51), teams());
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for m in [1, 2, 3, 4, 7, 16] {
            let n = random.of(&[1, 2, 7, 8, 9, 40, 130]);
            let k = random.of(&[64, 65, 71, 96, 127, 300]);
            check(&mut random, &teams, [m, n, k], dtype, false);
        }
        // Threads share it.
        check(&mut random, &teams, [2, 300, 515], dtype, false);
    }
}

#[test]
fn products_of_one_column() {
    let (mut random, teams) = (Random(0x52), teams());
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for n in [1, 3, 8, 50, 700] {
            let k = random.of(&[64, 70, 129]);
            check(&mut random, &teams, [1, n, k], dtype, true);
        }
    }
}

/// Rows have the same bits for any number of rows up to the bound.
#[test]
fn fewer_rows_than_the_bound() {
    let (mut random, teams) = (Random(0x53), teams());
    let (most, n, k) = (9usize, 33, 200);
    let body = Matmul {
        k: Size::fixed(k),
        in_order: false,
        a: operand(0, &[k, 1]),
        b: operand(0, &[1, k]),
    };
    let mut spec = plain(&[1, n as usize], k as usize, body.a.clone(), body.b.clone());
    spec.body = Body::Matmul(body);
    spec.dims[0] = Size::symbol(Symbol(0));
    let (mut bound, mut env) = (Env::default(), Env::default());
    bound.0[0] = most as u32;
    let a = random.floats(most * k as usize);
    let b = random.floats((n * k) as usize);
    let mut whole: Vec<(Isa, Vec<f32>)> = Vec::new();
    for rows in (0..=most).rev() {
        env.0[0] = rows as u32;
        let result = vec![f32::NAN; most * n as usize];
        let args = [a.clone(), b.clone(), result];
        for (isa, results) in run_all(&spec, &bound, &env, &teams, &args) {
            let own = &results[2][..rows * n as usize];
            match whole.iter().find(|(of, _)| *of == isa) {
                None => whole.push((isa, own.to_vec())),
                Some((_, whole)) => {
                    let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                    assert!(bits(own) == bits(&whole[..own.len()]), "{isa} {rows} rows");
                }
            }
            let rest = &results[2][rows * n as usize..];
            assert!(rest.iter().all(|x| x.is_nan()));
        }
    }
}
