//! Reports of plans: a few lines of text, pictures, and an interactive page.

use crate::bytes::Bytes;
use crate::dag::Dag;
use crate::plan::{Holder, Plan, holders_at_peak, peak, saved_in_place};
use std::fmt;

mod svg;
mod timeline;

pub use svg::{packing_svg, svg};
pub use timeline::{ReceivedBytes, Run, RunStep, html, why_at_peak};

/// The number of holders at the peak that [`text`] names.
const HOLDERS_MAX: usize = 6;

/// A summary of a plan: the size of the slab and its lower bound, the savings and their causes, and
/// the holders of the most bytes at the peak. Without a line break at the end.
/// Without line break at the end.
///
/// ```text
/// slab         2.1 MiB · lower bound 2.0 MiB · fragmentation 4.8 % · without reuse 6.9 MiB
/// saved by     reuse 4.3 MiB · in-place 512.0 KiB (9)
/// peak         step 17 body.conv2d.grad: stem.relu 0.9 MiB, body.cols 0.6 MiB
/// made by      greedy order of 38 tasks · skyline by size
/// ```
///
/// # Panics
/// If the plan is not one of this dag.
pub fn text<'a>(dag: &'a Dag, plan: &'a Plan) -> impl fmt::Display + 'a {
    Text { dag, plan }
}

struct Text<'a> {
    dag: &'a Dag,
    plan: &'a Plan,
}

impl fmt::Display for Text<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (dag, plan) = (self.dag, self.plan);
        writeln!(f, "{:<13}{}", "slab", Slab(plan))?;
        let in_place = saved_in_place(dag, plan);
        let reuse = plan
            .without_reuse
            .saturating_sub(plan.height)
            .saturating_sub(in_place);
        writeln!(
            f,
            "{:<13}reuse {} · in-place {} ({})",
            "saved by",
            Bytes(reuse),
            Bytes(in_place),
            plan.reused.len()
        )?;
        let (step, _) = peak(dag, plan);
        write!(f, "{:<13}step {step}", "peak")?;
        if let Some(&task) = plan.order.get(step) {
            write!(f, " {}", dag.task_name(task))?;
        }
        let holders = holders_at_peak(dag, plan);
        for (i, &(holder, bytes)) in holders.iter().take(HOLDERS_MAX).enumerate() {
            let separator = if i == 0 { ": " } else { ", " };
            match holder {
                Holder::Buffer(id) => {
                    write!(f, "{separator}{} {}", dag.buffer_name(id), Bytes(bytes))?
                }
                Holder::Workspace(task) => write!(
                    f,
                    "{separator}workspace of {} {}",
                    dag.task_name(task),
                    Bytes(bytes)
                )?,
            }
        }
        if holders.len() > HOLDERS_MAX {
            let rest = holders[HOLDERS_MAX..].iter().map(|&(_, bytes)| bytes).sum();
            write!(f, ", {} more {}", holders.len() - HOLDERS_MAX, Bytes(rest))?;
        }
        write!(
            f,
            "\n{:<13}{} of {} tasks · {}",
            "made by",
            plan.schedule,
            plan.order.len(),
            plan.method
        )
    }
}

/// The numbers of a plan in one line.
struct Slab<'a>(&'a Plan);

impl fmt::Display for Slab<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plan = self.0;
        let (height, bound, apart) = (
            Bytes(plan.height),
            Bytes(plan.lower_bound),
            Bytes(plan.without_reuse),
        );
        let percent = 100.0 * plan.fragmentation();
        write!(
            f,
            "{height} · lower bound {bound} · fragmentation {percent:.1} % · without reuse {apart}"
        )
    }
}

impl fmt::Display for Plan {
    /// The numbers in one line; see [`text`] for more, with names.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "slab {} · {} of {} tasks · {}",
            Slab(self),
            self.schedule,
            self.order.len(),
            self.method
        )
    }
}

#[cfg(test)]
mod tests;
