//! The kernels for matrix products and convolutions, ranked by their estimated times.

use slabwise_kernels::dtype::DType;
use slabwise_kernels::size::Env;
use slabwise_kernels::spec::{Body, Spec, SpecError};

use crate::abi::{Function, Target, Word};
use crate::conv;
use crate::gemm::emit;
use crate::gemm::library::{Form, Product};
use crate::gemm::plan::{self, Plan, ProductInfo, SM_MIN, Sizes, SumOrder};
use crate::gemm::problem::{Problem, View};
use crate::gemm::tiles::Elem;
use crate::gemm::totals;
use crate::lowered::{Lowered, WORKSPACE_ALIGN};

/// A candidate kernel for a product.
#[derive(Debug)]
pub struct Candidate {
    /// The kernel and the number of parts: `gemm_128x64 in 3 parts`.
    pub name: String,
    /// The estimated time in cycles of a multiprocessor: only for comparing candidates of one spec.
    pub cycles: f64,
    /// The launches.
    pub lowered: Lowered,
}

/// The candidates for a matrix product or a convolution, the smallest estimate first.
///
/// [`crate::lower`] chooses the first: the choice depends only on the sizes at the bounds and the
/// target. With a device, the tuner may time the first few together with a library's kernels for
/// the same spec, and keep the fastest: all compute the same sums, in different orders.
pub fn candidates(spec: &Spec, bounds: &Env, target: &Target) -> Result<Vec<Candidate>, SpecError> {
    let Ranked {
        problems, plans, ..
    } = ranked(spec, bounds, target)?;
    plans
        .iter()
        .map(|plans| candidate(spec, &problems, plans, bounds, target))
        .collect()
}

/// The names of the candidates, the best first, without their source.
pub(crate) fn names(spec: &Spec, bounds: &Env, target: &Target) -> Result<Vec<String>, SpecError> {
    let Ranked { plans, .. } = ranked(spec, bounds, target)?;
    Ok(plans.iter().map(|plans| name(&plans[0])).collect())
}

/// The candidate of this name, or else the first.
pub(crate) fn named(
    spec: &Spec,
    bounds: &Env,
    target: &Target,
    wanted: &str,
) -> Result<Candidate, SpecError> {
    let Ranked {
        problems, plans, ..
    } = ranked(spec, bounds, target)?;
    let found = plans
        .iter()
        .find(|plans| name(&plans[0]) == wanted)
        .or(plans.first());
    candidate(
        spec,
        &problems,
        found.ok_or_else(none_fits)?,
        bounds,
        target,
    )
}

/// The cycles of the model's first choice for a product, or by a library if that is estimated to
/// take fewer.
pub(super) fn cycles(spec: &Spec, bounds: &Env, target: &Target) -> Option<f64> {
    let ranked = ranked(spec, bounds, target).ok()?;
    let own = ranked.plans.first()?.first()?.cycles;
    Some(library_cycles(spec, bounds, target).map_or(own, |library| own.min(library)))
}

/// The share of the peak that cuBLASLt's products reach, where they are large.
const LIBRARY_SHARE: f64 = 0.72;

/// The estimated cycles of a matrix product by cuBLASLt, with those in which the sums move to a kernel
/// for the epilogue where the library cannot write the result. `None` if it cannot compute it.
pub fn library_cycles(spec: &Spec, bounds: &Env, target: &Target) -> Option<f64> {
    let Body::Matmul(body) = &spec.body else {
        return None;
    };
    let problem = Problem::matmul(spec, body).ok()?;
    let product = Product::of(Form::single(problem), spec, bounds, target)?;
    let speeds = target.speeds;
    // The library has instructions for more than the rate of `mma.sync`.
    let peak = |by_mma: u32| f64::from(by_mma) * 1e3 / f64::from(speeds.mma_share.max(1));
    let rate = match body.a.dtype {
        DType::F32 if target.tf32 => peak(speeds.tf32),
        DType::F32 => f64::from(speeds.f32),
        _ => peak(speeds.half),
    };
    let rate = rate * LIBRARY_SHARE * f64::from(target.multiprocessors);
    let multiplied = plan::START + multiplications(spec, bounds) as f64 / rate;
    let memory = f64::from(speeds.memory) / 1e3 * f64::from(target.multiprocessors);
    // They are written, and read by another kernel.
    let sums = match product.sums() {
        0 => 0.0,
        bytes => plan::START + 2.0 * bytes as f64 / memory,
    };
    Some(multiplied + sums)
}

/// The cycles that the model's first choice for a product saves over its first choice for the same
/// product with other strides. `None` if the two compute their sums in different orders, whose
/// results differ in rounding, or if one of the specs is no product.
pub fn cycles_saved(before: &Spec, after: &Spec, bounds: &Env, target: &Target) -> Option<f64> {
    let first = |spec: &Spec| {
        let Ranked {
            problems,
            plans,
            views,
        } = ranked(spec, bounds, target).ok()?;
        let plan = *plans.first()?.first()?;
        let of = |problem: &Problem| emit::sum_order(problem, &plan, &views, bounds);
        let orders: Vec<SumOrder> = problems.iter().map(of).collect();
        Some((plan.cycles, orders))
    };
    let ((before, order), (after, new_order)) = (first(before)?, first(after)?);
    (order == new_order).then_some(before - after)
}

/// The number of multiplications of a product, at the bounds.
pub(crate) fn multiplications(spec: &Spec, bounds: &Env) -> i64 {
    let problems = match &spec.body {
        Body::Matmul(body) => Problem::matmul(spec, body).map(|problem| vec![problem]),
        Body::Conv2d(body) => conv::problems(spec, body, bounds).map(|(problems, _)| problems),
        Body::QuantizedMatmul(body) => Problem::quantized(spec, body).map(|problem| vec![problem]),
        _ => return 0,
    };
    let of = |p: &Problem| {
        p.sizes(bounds)
            .iter()
            .fold(1i64, |a, &b| a.saturating_mul(b))
    };
    problems.map_or(0, |list| list.iter().map(of).fold(0, i64::saturating_add))
}

fn none_fits() -> SpecError {
    SpecError::unsupported("no kernel fits in the shared memory of the device")
}

/// The name of a plan: the kernel and the number of parts.
fn name(plan: &Plan) -> String {
    let parts = if plan.parts > 1 {
        format!(" in {} parts", plan.parts)
    } else {
        String::new()
    };
    plan.kernel.name() + &parts
}

/// The source for a matrix product or a convolution: the first candidate.
pub fn lower(spec: &Spec, bounds: &Env, target: &Target) -> Result<Lowered, SpecError> {
    let Ranked {
        problems, plans, ..
    } = ranked(spec, bounds, target)?;
    let best = plans.first().ok_or_else(none_fits)?;
    Ok(candidate(spec, &problems, best, bounds, target)?.lowered)
}

/// The choice among the kernels for a spec.
struct Ranked {
    /// The problems that together compute the result.
    problems: Vec<Problem>,
    /// The plans for them (one for each problem), the best first.
    plans: Vec<Vec<Plan>>,
    /// Both operands of the largest problem.
    views: [View; 2],
}

/// The kernels for a matrix product or a convolution, ranked by their estimated times.
fn ranked(spec: &Spec, bounds: &Env, target: &Target) -> Result<Ranked, SpecError> {
    let (problems, direct) = match &spec.body {
        Body::Matmul(body) => (vec![Problem::matmul(spec, body)?.oriented(spec)], None),
        Body::Conv2d(body) => conv::problems(spec, body, bounds)?,
        Body::QuantizedMatmul(body) => (vec![Problem::quantized(spec, body)?], None),
        _ => {
            return Err(SpecError::unsupported(
                "neither a matrix product nor a convolution",
            ));
        }
    };
    if target.sm < SM_MIN {
        return Err(SpecError::unsupported(format!(
            "products need a device of compute capability {}.{}, not {}.{}",
            SM_MIN / 10,
            SM_MIN % 10,
            target.sm / 10,
            target.sm % 10
        )));
    }
    if spec.reduced > 0 {
        totals::check(spec, &problems)?;
    }
    let Some(widest) = problems.iter().max_by_key(|p| {
        p.sizes(bounds)
            .iter()
            .fold(1i64, |a, &b| a.saturating_mul(b))
    }) else {
        return Err(SpecError::unsupported("a product of nothing"));
    };
    for problem in &problems {
        emit::check_sizes(problem, bounds)?;
    }
    let elems = Elem::of_both(spec, widest)?;
    let views = emit::views(widest, elems, false, bounds);
    let both = [&views[0], &views[1]];
    let info = |sizes: Sizes, elements: [f64; 2]| ProductInfo {
        sizes,
        elements,
        views: both,
        elems,
        totals: totals::words(spec),
        target,
    };
    // The number of rows or columns must be small in every problem.
    let sizes = problems
        .iter()
        .map(|p| p.sizes(bounds))
        .fold([0; 4], |most, s| std::array::from_fn(|i| most[i].max(s[i])));
    let widest_of_all = info(sizes, widest.elements(bounds));
    let each: Vec<_> = problems
        .iter()
        .filter(|problem| !emit::sums_nothing(problem, bounds))
        .map(|problem| info(problem.sizes(bounds), problem.elements(bounds)))
        .collect();
    let mut choices = widest_of_all.plans();
    for plan in &mut choices {
        plan.cycles = plan::cycles_of_all(&each, plan);
    }
    choices.sort_by(|a, b| a.cycles.total_cmp(&b.cycles));
    let fits = |plan: &Plan| -> Result<bool, SpecError> {
        let bytes = |p| emit::shared_bytes(&plan.kernel, spec, p, bounds, target);
        let most = problems.iter().map(bytes).collect::<Result<Vec<_>, _>>()?;
        Ok(most
            .iter()
            .all(|&n| n <= i64::from(target.shared_bytes_max)))
    };
    let mut plans: Vec<Vec<Plan>> = Vec::new();
    for plan in choices {
        if (spec.reduced == 0 || totals::has_totals(&plan.kernel)) && fits(&plan)? {
            plans.push(vec![plan; problems.len()]);
        }
    }
    // For few elements and no sum over channels, no tiled kernel is as fast.
    plans.splice(
        0..0,
        direct.filter(|_| spec.reduced == 0).map(|kernels| {
            kernels
                .into_iter()
                .map(|kernel| Plan {
                    kernel,
                    parts: 1,
                    cycles: 0.0,
                })
                .collect()
        }),
    );
    Ok(Ranked {
        problems,
        plans,
        views,
    })
}

fn candidate(
    spec: &Spec,
    problems: &[Problem],
    plans: &[Plan],
    bounds: &Env,
    target: &Target,
) -> Result<Candidate, SpecError> {
    let mut functions: Vec<Function> = Vec::new();
    let mut launches = Vec::new();
    // Each problem has its own points of the result, partial sums and counters, so that they may run
    // side by side.
    let (mut workspace, mut counters) = (0u64, 0);
    for (problem, plan) in problems.iter().zip(plans) {
        let (sums, tiles) = emit::shared_between_all(spec, problem, plan, bounds);
        let aligned = workspace.checked_next_multiple_of(WORKSPACE_ALIGN);
        let first = (aligned.unwrap_or(u64::MAX), counters);
        if sums > 0 {
            workspace = first.0.saturating_add(sums);
        }
        counters += tiles;
        let emit::Launchable { function, dispatch } =
            emit::product(spec, problem, plan, bounds, target)?;
        let at = functions.iter().position(|f| *f == function);
        launches.push((at.unwrap_or(functions.len()), first, dispatch));
        if at.is_none() {
            functions.push(function);
        }
    }
    let lowered = Lowered::new(functions, workspace, move |env| {
        let run = |(function, first, dispatch): &(usize, (u64, usize), emit::Launch)| {
            let mut dispatch = dispatch(env);
            dispatch.function = *function;
            for word in &mut dispatch.words {
                match word {
                    Word::Workspace(at) => *at = at.saturating_add(first.0),
                    Word::Counters(at) => *at += first.1,
                    _ => {}
                }
            }
            dispatch
        };
        launches.iter().map(run).collect()
    });
    let mut lowered = lowered.with_counters(counters);
    lowered.side_by_side = problems.len() > 1;
    Ok(Candidate {
        name: name(&plans[0]),
        cycles: plans[0].cycles,
        lowered: super::checked(lowered, bounds)?,
    })
}

/// The product of a spec as cuBLASLt could compute it, in the form with the fewest products: a
/// matrix product, or a convolution whose kernel has one element. A convolution is one product
/// where its images are stored channels-last, and otherwise one product per image.
pub(crate) fn by_cublaslt(spec: &Spec, bounds: &Env, target: &Target) -> Option<Product> {
    let forms = match &spec.body {
        Body::Matmul(body) => {
            let whole = Problem::matmul(spec, body).ok()?;
            vec![Form::single(whole.oriented(spec))]
        }
        Body::Conv2d(body) => {
            let [whole, apart] = conv::pointwise(spec, body, bounds)?.map(|p| p.oriented(spec));
            vec![Form::single(whole.clone()), Form::of_parts(&whole, apart)]
        }
        _ => return None,
    };
    // Sums of the epilogue need all rows of a column.
    let is_summed = |form: &Form| spec.reduced == 0 || totals::check(spec, form.problems()).is_ok();
    forms
        .into_iter()
        .filter(is_summed)
        .find_map(|form| Product::of(form, spec, bounds, target))
}
