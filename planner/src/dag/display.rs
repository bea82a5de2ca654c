//! The text of a dag, human-readable and for Graphviz.

use std::fmt;

use super::{BufferId, Dag};

impl Dag {
    /// Graphviz text: tasks as boxes, buffers as ellipses with their sizes, control dependencies
    /// dashed.
    pub fn to_dot(&self) -> String {
        let quoted = |text: &str| {
            text.replace('\\', "\\\\")
                .replace('"', "\\\"")
                .replace('\n', " ")
        };
        let mut dot =
            String::from("digraph tasks {\n  node [fontname=\"monospace\" fontsize=10];\n");
        for (i, buffer) in self.buffers.iter().enumerate() {
            let size = crate::Bytes(buffer.bytes);
            dot += &format!(
                "  b{i} [label=\"{}\\n{} · {size}\"];\n",
                quoted(&buffer.name),
                buffer.kind.label()
            );
        }
        for (i, task) in self.tasks.iter().enumerate() {
            dot += &format!(
                "  t{i} [shape=box style=filled fillcolor=\"#eef2f7\" label=\"{}\"];\n",
                quoted(&task.name)
            );
            for read in &task.reads {
                dot += &format!("  b{} -> t{i};\n", read.0);
            }
            for write in &task.writes {
                dot += &format!("  t{i} -> b{};\n", write.0);
            }
            for before in &task.after {
                dot += &format!("  t{} -> t{i} [style=dashed];\n", before.0);
            }
        }
        dot + "}\n"
    }
}

impl fmt::Display for Dag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |ids: &[BufferId]| {
            let named = |id: &BufferId| match self.buffers.get(id.index()) {
                Some(buffer) => format!("{} {}", buffer.name, crate::Bytes(buffer.bytes)),
                None => format!("b{}?", id.0),
            };
            ids.iter().map(named).collect::<Vec<_>>().join(", ")
        };
        writeln!(
            f,
            "{} tasks, {} buffers",
            self.tasks.len(),
            self.buffers.len()
        )?;
        for (i, task) in self.tasks.iter().enumerate() {
            write!(
                f,
                "{i:>5} {}: {} -> {}",
                task.name,
                list(&task.reads),
                list(&task.writes)
            )?;
            if task.workspace > 0 {
                write!(f, " · workspace {}", crate::Bytes(task.workspace))?;
            }
            if !task.after.is_empty() {
                write!(
                    f,
                    " · after {}",
                    task.after
                        .iter()
                        .map(|t| t.0.to_string())
                        .collect::<Vec<_>>()
                        .join(", ")
                )?;
            }
            for pair in self.may_reuse.iter().filter(|pair| pair.task.index() == i) {
                write!(
                    f,
                    " · may reuse {} for {}",
                    list(&[pair.from]),
                    list(&[pair.to])
                )?;
            }
            writeln!(f)?;
        }
        Ok(())
    }
}
