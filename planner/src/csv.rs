//! The packing problem of a plan, and packing problems as CSV text: see [`slabwise_packer::csv`].

use crate::dag::Dag;
use crate::plan::{Layout, Plan};
use slabwise_packer::{Placement, Problem};
use std::collections::HashSet;

pub use slabwise_packer::csv::*;

/// The packing problem inside a plan with its solution: one item per rectangle. Buffers computed in
/// place therefore share an item with those whose bytes they take over, and workspaces are items
/// named after their tasks. A repeated name is made unique by the index of its buffer or task.
pub fn of_plan(dag: &Dag, plan: &Plan) -> Table {
    let layout = Layout::new(dag, &plan.order, &plan.lifetimes, &plan.reused);
    let mut rows: Vec<Option<(String, u64)>> = vec![None; layout.problem.items.len()];
    let mut names = HashSet::new();
    let mut name = |row: &mut Option<(String, u64)>, mut name: String, id: String, offset: u64| {
        if row.is_none() {
            while !names.insert(name.clone()) {
                name = format!("{name}#{id}");
            }
            *row = Some((name, offset));
        }
    };
    for (i, item) in layout
        .item_of_buffer
        .iter()
        .enumerate()
        .filter_map(|(i, item)| Some((i, (*item)?)))
    {
        name(
            &mut rows[item as usize],
            dag.buffers[i].name.clone(),
            i.to_string(),
            plan.offsets[i],
        );
    }
    for (i, item) in layout
        .item_of_workspace
        .iter()
        .enumerate()
        .filter_map(|(i, item)| Some((i, (*item)?)))
    {
        name(
            &mut rows[item as usize],
            format!("{}.workspace", dag.tasks[i].name),
            format!("t{i}"),
            plan.workspace_offsets[i],
        );
    }
    let rows: Vec<(String, u64)> = rows.into_iter().map(Option::unwrap_or_default).collect();
    let start = (0..)
        .zip(&rows)
        .map(|(item, &(_, offset))| Placement { item, offset })
        .collect();
    Table::new(
        Problem {
            start,
            ..layout.problem
        },
        rows.iter().map(|(name, _)| name.as_str()),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dag::{Buffer, Kind, Task};
    use crate::{Options, plan};

    #[test]
    fn the_problem_of_a_plan_has_its_height() {
        let mut dag = Dag::new();
        let x = dag.add_buffer(Buffer {
            live_in: true,
            ..Buffer::new("x", Kind::Input, 1000)
        });
        let same = dag.add_buffer(Buffer::new("x", Kind::Activation, 1000));
        let y = dag.add_buffer(Buffer {
            live_out: true,
            ..Buffer::new("y", Kind::Output, 64)
        });
        let task = dag.add_task(Task {
            workspace: 100,
            ..Task::new("f", &[x], &[same])
        });
        dag.add_task(Task::new("g", &[same], &[y]));
        dag.may_reuse.push(crate::MayReuse {
            task,
            from: x,
            to: same,
        });
        for in_place in [true, false] {
            let plan = plan(
                &dag,
                &Options {
                    in_place,
                    ..Options::default()
                },
            )
            .expect("a valid dag");
            let table = of_plan(&dag, &plan);
            let mut ids: Vec<&str> = (0..table.problem.items.len())
                .map(|item| table.id(item))
                .collect();
            ids.sort_unstable();
            let expected: &[&str] = if in_place {
                &["f.workspace", "x", "y"]
            } else {
                &["f.workspace", "x", "x#1", "y"]
            };
            assert_eq!(ids, expected);
            let height = table
                .problem
                .start
                .iter()
                .map(|at| at.offset + table.problem.items[at.item].size)
                .max();
            assert_eq!(height, Some(plan.height));
            assert_eq!(read(&write(&table)), Ok(table));
        }
    }
}
