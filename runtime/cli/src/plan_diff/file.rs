//! A plan as a file, as `slabwise plan --json` writes it.

use std::path::Path;

use serde::{Deserialize, Serialize};
use slabwise::Plan;
use slabwise_planner::csv::{self, FileError};
use slabwise_planner::{Holder, brief, holders_at_peak, peak, shortened};

/// The most bytes of a file, unpacked: some hundred thousand buffers.
pub const FILE_MAX: u64 = 1 << 26;

/// Most characters of a parser's message.
const MESSAGE_MAX: usize = 200;

/// The number of the format that is written. A new key keeps it; a key that is renamed, removed or
/// has another meaning increases it.
pub const FORMAT: u32 = 1;

fn first_format() -> u32 {
    1
}

/// The part of a plan that two plans are compared by. Bytes, but for steps.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlanFile {
    /// The format's number, at most [`FORMAT`].
    #[serde(default = "first_format")]
    pub format: u32,
    /// The slab.
    pub slab_bytes: u64,
    /// The lower bound of any assignment of offsets for this order.
    pub lower_bound_bytes: u64,
    /// The bytes of a plan in which no two buffers share bytes.
    pub without_reuse_bytes: u64,
    /// The step with the most live bytes.
    pub peak: Peak,
    /// Buffers, then workspaces.
    pub buffers: Vec<Row>,
}

/// The number of a file's format, whatever its other keys are.
#[derive(Deserialize)]
struct Format {
    #[serde(default = "first_format")]
    format: u32,
}

/// The step with the most live bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Peak {
    /// Which one.
    pub step: u64,
    /// Its kernel.
    pub kernel: String,
    /// Its live bytes.
    pub bytes: u64,
}

/// A buffer or workspace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Unchecked")]
pub struct Row {
    /// Its name.
    pub name: String,
    /// Its purpose, such as `activation`.
    pub kind: String,
    /// The layer's path; empty outside of layers.
    pub layer: String,
    /// The user's line, `file:line`; empty if unknown.
    pub source: String,
    /// Bytes that are used.
    pub bytes: u64,
    /// Bytes of the slab that it occupies.
    pub occupied_bytes: u64,
    /// The first of them.
    pub offset: u64,
    /// The first step at which it has bytes.
    pub start: u64,
    /// The step after the last one.
    pub end: u64,
    /// The kernel of the first step.
    pub first: String,
    /// The kernel of the last one.
    pub last: String,
    /// Whether it counts among the live bytes of the peak.
    pub at_peak: bool,
}

/// A row as it stands in a file.
#[derive(Deserialize)]
struct Unchecked {
    name: String,
    #[serde(default)]
    kind: String,
    #[serde(default)]
    layer: String,
    #[serde(default)]
    source: String,
    bytes: u64,
    #[serde(default)]
    occupied_bytes: Option<u64>,
    offset: u64,
    start: u64,
    end: u64,
    #[serde(default)]
    first: String,
    #[serde(default)]
    last: String,
    at_peak: bool,
}

impl TryFrom<Unchecked> for Row {
    type Error = String;

    fn try_from(row: Unchecked) -> Result<Row, String> {
        let Unchecked {
            name,
            kind,
            layer,
            source,
            bytes,
            occupied_bytes,
            offset,
            start,
            end,
            first,
            last,
            at_peak,
        } = row;
        let occupied_bytes = occupied_bytes.unwrap_or(bytes);
        if end < start {
            let name = brief(&name);
            return Err(format!(
                "buffer `{name}` ends at step {end}, before it begins at step {start}"
            ));
        }
        if occupied_bytes < bytes {
            let name = brief(&name);
            return Err(format!(
                "buffer `{name}` has {bytes} bytes, but occupies {occupied_bytes}"
            ));
        }
        if offset.checked_add(occupied_bytes).is_none() {
            let name = brief(&name);
            return Err(format!("buffer `{name}` ends behind 2^64 bytes"));
        }
        Ok(Row {
            name,
            kind,
            layer,
            source,
            bytes,
            occupied_bytes,
            offset,
            start,
            end,
            first,
            last,
            at_peak,
        })
    }
}

impl Row {
    /// For how many steps it has bytes.
    pub fn steps(&self) -> u64 {
        self.end - self.start
    }

    /// The bytes it holds at the peak.
    pub fn at_peak_bytes(&self) -> u64 {
        if self.at_peak { self.occupied_bytes } else { 0 }
    }
}

/// Why a file is not a plan.
#[derive(Debug, thiserror::Error)]
pub enum PlanFileError {
    /// It could not be read, or is longer than [`FILE_MAX`] bytes.
    #[error(transparent)]
    File(#[from] FileError),
    /// It is no plan.
    #[error("{}: {message}", path.display())]
    Format {
        /// Which file.
        path: std::path::PathBuf,
        /// The defect, and its line.
        message: String,
    },
}

impl PlanFile {
    /// The file of a plan.
    pub fn of(plan: &Plan) -> PlanFile {
        let (dag, offsets) = (plan.dag(), plan.offsets());
        let (step, bytes) = peak(dag, offsets);
        let kernel = |step: u64| {
            offsets
                .order
                .get(step as usize)
                .map_or(String::new(), |&task| dag.task_name(task).into())
        };
        let at_peak: std::collections::HashSet<Holder> = holders_at_peak(dag, offsets)
            .into_iter()
            .map(|(holder, _)| holder)
            .collect();
        let row = |name: String, kind: &str, start: u64, end: u64, holder: Holder| Row {
            name,
            kind: kind.into(),
            layer: String::new(),
            source: String::new(),
            bytes: 0,
            occupied_bytes: 0,
            offset: 0,
            first: kernel(start),
            last: kernel(end.saturating_sub(1)),
            start,
            end,
            at_peak: at_peak.contains(&holder),
        };
        let in_slab = (0u32..)
            .zip(&dag.buffers)
            .filter(|(_, buffer)| buffer.space == slabwise_planner::Space::Device);
        let buffers = in_slab.map(|(id, buffer)| {
            let life = offsets.lifetimes[id as usize];
            Row {
                layer: buffer.layer.clone(),
                source: buffer.source.clone(),
                bytes: buffer.bytes,
                occupied_bytes: buffer.occupied(),
                offset: offsets.offsets[id as usize],
                ..row(
                    buffer.name.clone(),
                    buffer.kind.label(),
                    life.start,
                    life.end,
                    Holder::Buffer(slabwise_planner::BufferId(id)),
                )
            }
        });
        let workspaces = (0u64..)
            .zip(&offsets.order)
            .map(|(step, id)| (step, *id, &dag.tasks[id.index()]));
        let workspaces =
            workspaces
                .filter(|(_, _, task)| task.workspace > 0)
                .map(|(step, id, task)| Row {
                    // A workspace has no layer, but its task makes the values of one.
                    layer: task
                        .writes
                        .iter()
                        .chain(&task.reads)
                        .next()
                        .map_or(String::new(), |b| dag.buffers[b.index()].layer.clone()),
                    bytes: task.workspace,
                    occupied_bytes: task.workspace_occupied(),
                    offset: offsets.workspace_offsets[id.index()],
                    ..row(
                        format!("workspace of {}", task.name),
                        "workspace",
                        step,
                        step + 1,
                        Holder::Workspace(id),
                    )
                });
        PlanFile {
            format: FORMAT,
            slab_bytes: plan.slab_bytes(),
            lower_bound_bytes: plan.lower_bound_bytes(),
            without_reuse_bytes: plan.without_reuse_bytes(),
            peak: Peak {
                step: step as u64,
                kernel: kernel(step as u64),
                bytes,
            },
            buffers: buffers.chain(workspaces).collect(),
        }
    }

    /// Reads a file, gzipped or not.
    ///
    /// # Errors
    /// If it cannot be read, is too long or is not a plan; a malformed entry is named with its
    /// line.
    pub fn read_file(path: &Path) -> Result<PlanFile, PlanFileError> {
        let wrong = |message| PlanFileError::Format {
            path: path.into(),
            message,
        };
        let bytes = csv::read_packed(path, FILE_MAX)?;
        let text = str::from_utf8(&bytes).map_err(|error| {
            let line = 1 + bytes[..error.valid_up_to()]
                .iter()
                .filter(|&&byte| byte == b'\n')
                .count();
            wrong(format!("line {line} is not UTF-8"))
        })?;
        PlanFile::read(text).map_err(wrong)
    }

    /// Reads a file's contents.
    ///
    /// # Errors
    /// The defect, and its line.
    pub fn read(text: &str) -> Result<PlanFile, String> {
        let format = serde_json::from_str(text).map_or(FORMAT, |Format { format }| format);
        if format > FORMAT {
            return Err(format!(
                "a plan of format {format}; this version reads formats up to {FORMAT}, and a newer slabwise reads it"
            ));
        }
        let plan: PlanFile = serde_json::from_str(text).map_err(|e| {
            format!(
                "no plan as `slabwise plan --json` writes it: {}",
                shortened(&e.to_string(), MESSAGE_MAX)
            )
        })?;
        let sum: u128 = plan
            .buffers
            .iter()
            .map(|row| u128::from(row.at_peak_bytes()))
            .sum();
        if sum != u128::from(plan.peak.bytes) {
            return Err(format!(
                "the peak has {} bytes, but the buffers it lists as live there have {sum}",
                plan.peak.bytes
            ));
        }
        Ok(plan)
    }
}
