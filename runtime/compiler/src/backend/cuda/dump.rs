//! Dumps of a program's CUDA code: the source and the binary of each function, and the launches of
//! each step.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use slabwise_cuda::nvrtc::Usage;
use slabwise_cuda::{Dispatch, Lowered, PRELUDE};
use slabwise_kernels::size::Env;
use slabwise_planner::files;

use super::fusion::Group;
use super::{Gpu, Kernel, cuda_kernel};
use crate::backend::{LoadRequest, LoadStep};
use crate::dumps::{program_folder, source_file};
use crate::error::{Error, Result};

/// Writes a program's files to a new folder in `folder`: `NAME.cu` and `NAME.cubin` of each
/// function, `prelude.cuh`, which the sources include, and `steps.json`. The latter has for each
/// step its name, its launches at the bounds (function, grid, block, registers, bytes of static and
/// dynamic shared memory and of spilled registers), the part that cuBLASLt computes, and the
/// numbers of bytes and arithmetic operations; and the groups of steps that a recorded run fuses
/// horizontally.
///
/// # Errors
/// If the folder cannot be written to, or a function cannot be compiled on its own.
pub(super) fn write(
    folder: &Path,
    gpu: &Gpu,
    request: &LoadRequest<'_>,
    groups: &[Group],
) -> Result<()> {
    let own = program_folder(folder, request.name).map_err(io(folder))?;
    let save = |name: &str, bytes: &[u8]| {
        let path = own.join(name);
        files::replace(&path, bytes).map_err(io(&path))
    };
    let kernels: Vec<Option<&Kernel>> = request
        .steps
        .iter()
        .enumerate()
        .map(|(at, step)| step.kernel.and_then(|kernel| cuda_kernel(at, kernel).ok()))
        .collect();
    let functions = kernels
        .iter()
        .flatten()
        .map(|kernel| kernel.lowered.functions.clone())
        .chain(groups.iter().map(|group| group.kernel.functions.clone()))
        .flatten();
    let mut used: HashMap<String, Usage> = HashMap::new();
    save("prelude.cuh", PRELUDE.as_bytes())?;
    for function in functions {
        if used.contains_key(&function.name) {
            continue;
        }
        let code = gpu.device.code_of(&function).map_err(|e| Error::Device {
            device: request.name.to_string(),
            why: e.to_string(),
        })?;
        save(
            &format!("{}.cu", function.name),
            source_file(&function.source).as_bytes(),
        )?;
        save(&format!("{}.cubin", function.name), &code.image)?;
        used.extend(
            code.usage
                .iter()
                .map(|usage| (usage.name.clone(), usage.clone())),
        );
    }
    let bounds = request.bounds;
    let step = |(at, step): (usize, &LoadStep<'_>)| {
        let Some(Kernel { lowered, .. }) = kernels[at] else {
            return json!({ "step": at, "name": step.name, "launches": [], "bytes": 0, "flops": 0 });
        };
        json!({
            "step": at,
            "name": step.name,
            "library": lowered.library(),
            "launches": launches(lowered, &bounds, &used),
            "workspace_bytes": lowered.workspace,
            "bytes": step.bytes,
            "flops": step.flops,
        })
    };
    let together = |group: &Group| json!({ "steps": group.members, "launches": launches(&group.kernel, &bounds, &used) });
    let report = json!({
        "program": request.name,
        "steps": request.steps.iter().enumerate().map(step).collect::<Vec<_>>(),
        "together": groups.iter().map(together).collect::<Vec<_>>(),
    });
    save("steps.json", format!("{report:#}\n").as_bytes())
}

/// The launches of a kernel at these sizes.
fn launches(kernel: &Lowered, sizes: &Env, used: &HashMap<String, Usage>) -> Vec<Value> {
    let one = |dispatch: Dispatch| {
        let name = &kernel.functions[dispatch.function].name;
        let Usage {
            registers,
            spill_bytes,
            shared_bytes,
            ..
        } = used.get(name).cloned().unwrap_or_default();
        json!({
            "function": name,
            "grid": dispatch.grid,
            "block": dispatch.block,
            "registers": registers,
            "spill_bytes": spill_bytes,
            "static_shared_bytes": shared_bytes,
            "dynamic_shared_bytes": dispatch.shared_bytes,
        })
    };
    kernel.launches(sizes).into_iter().map(one).collect()
}

fn io(path: &Path) -> impl FnOnce(std::io::Error) -> Error {
    let path: PathBuf = path.into();
    move |source| Error::Io { path, source }
}
