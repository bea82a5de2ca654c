//! What a program became on a CUDA device, as files to read: the source and the code of each
//! function, and what each step launches.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use slabwise_cuda::nvrtc::Usage;
use slabwise_cuda::{Dispatch, Lowered, PRELUDE};
use slabwise_kernels::size::Env;
use slabwise_planner::files;

use crate::backend::{Gpu, Group, Kernel};
use crate::error::{Error, Result};
use crate::passes::dump::{program_folder, source_file};
use crate::passes::{moved, operations};
use crate::program::{Compiled, Step};

/// Writes into a folder of the program's own in `folder`: `NAME.cu` and `NAME.cubin` of each
/// function, `prelude.cuh`, which the sources include, and `steps.json`. That has for each step its
/// name, what it launches at the bounds (function, grid, block, registers, bytes of static and
/// dynamic shared memory and of spilled registers), what cuBLASLt computes of it, and how many
/// bytes and arithmetic operations that is; and the steps that a recorded run does together.
///
/// # Errors
/// If the folder cannot be written to, or a function not be compiled by itself.
pub(super) fn write(folder: &Path, gpu: &Gpu, inner: &Compiled, groups: &[Group]) -> Result<()> {
    let own = program_folder(folder, &inner.name).map_err(io(folder))?;
    let save = |name: &str, bytes: &[u8]| {
        let path = own.join(name);
        files::replace(&path, bytes).map_err(io(&path))
    };
    let kernel = |step: &Step| {
        if let Some(Kernel::Cuda(_, lowered)) = step.kernel() {
            Some(lowered.functions.clone())
        } else {
            None
        }
    };
    let functions = inner
        .steps
        .iter()
        .filter_map(kernel)
        .chain(groups.iter().map(|group| group.kernel.functions.clone()))
        .flatten();
    let mut used: HashMap<String, Usage> = HashMap::new();
    save("prelude.cuh", PRELUDE.as_bytes())?;
    for function in functions {
        if used.contains_key(&function.name) {
            continue;
        }
        let code = gpu.device.code_of(&function).map_err(|e| Error::Device {
            device: inner.name.to_string(),
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
    let bounds = inner.symbols.bounds();
    let step = |(at, step): (usize, &Step)| {
        let Some(Kernel::Cuda(spec, lowered)) = step.kernel() else {
            return json!({ "step": at, "name": step.name, "launches": [], "bytes": 0, "flops": 0 });
        };
        let [product, code] = operations(spec, &bounds);
        json!({
            "step": at,
            "name": step.name,
            "library": lowered.library(),
            "launches": launches(lowered, &bounds, &used),
            "workspace_bytes": lowered.workspace,
            "bytes": moved(spec, &bounds),
            "flops": product.saturating_add(code),
        })
    };
    let together = |group: &Group| json!({ "steps": group.members, "launches": launches(&group.kernel, &bounds, &used) });
    let report = json!({
        "program": &*inner.name,
        "steps": inner.steps.iter().enumerate().map(step).collect::<Vec<_>>(),
        "together": groups.iter().map(together).collect::<Vec<_>>(),
    });
    save("steps.json", format!("{report:#}\n").as_bytes())
}

/// What a kernel launches at these sizes.
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
