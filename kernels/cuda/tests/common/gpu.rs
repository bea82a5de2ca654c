//! Runs specs on a GPU, where there is one: the emulator cannot tell how a real device executes the
//! same source (the order of operands in inline PTX, how tensor cores round, fast instructions).

use slabwise_cuda::driver::DriverError;
use slabwise_cuda::emulator::separate_arenas;
use slabwise_cuda::{Device, Launch, Limits, Lowered, Program, workspace_bytes};
use slabwise_kernels::memory::Region;

use super::{Case, NO_FAULT, Slab};

/// A device with the kernels of some cases loaded.
pub struct Gpu {
    device: Device,
    program: Program,
}

impl Gpu {
    /// Loads kernels on the first device. `None` without a device or a compiler, which is printed,
    /// unless a device is required.
    pub fn load(kernels: &[&Lowered]) -> Option<Gpu> {
        if !slabwise_cuda::emulator::gpu_usable() {
            return None;
        }
        let device = Device::open(
            0,
            Limits {
                fraction: 0.75,
                bytes_max: None,
                preallocate: false,
            },
        )
        .expect("it is usable");
        let program = device.load(kernels).unwrap_or_else(|e| panic!("{e}"));
        Some(Gpu { device, program })
    }

    /// The arguments and the fault record after one of the loaded kernels has run. Runs it twice,
    /// and compares the bits.
    pub fn run(
        &mut self,
        step: usize,
        case: &Case,
        kernel: &Lowered,
    ) -> Result<(Vec<Vec<u8>>, u64), String> {
        let first = self
            .once(step, case, kernel)
            .map_err(|e| format!("on the GPU: {e}"))?;
        let again = self
            .once(step, case, kernel)
            .map_err(|e| format!("on the GPU: {e}"))?;
        if first == again {
            Ok(first)
        } else {
            Err("on the GPU: other bits when it is run again".into())
        }
    }

    fn once(
        &mut self,
        step: usize,
        case: &Case,
        kernel: &Lowered,
    ) -> Result<(Vec<Vec<u8>>, u64), String> {
        if separate_arenas() {
            return self.once_apart(step, case, kernel);
        }
        let mut slab = Slab::default();
        let own: Vec<usize> = case.args.iter().map(|a| slab.push(a)).collect();
        let at: Vec<usize> = (0..own.len()).map(|a| own[case.region_of(a)]).collect();
        let workspace = slab.push(&vec![0xff; workspace_bytes(kernel) as usize]);
        let mut slab = slab.fixed();
        let whole = self.device.reserve(slab.len as u64).map_err(text)?;
        self.device
            .write(&whole, slab.bytes(0, slab.len))
            .map_err(text)?;
        let part = |at: usize, bytes: usize| whole.part(at as u64, bytes as u64);
        let arguments: Vec<_> = at
            .iter()
            .zip(&case.args)
            .map(|(&at, a)| part(at, a.len()))
            .collect();
        let workspace = part(workspace, workspace_bytes(kernel) as usize);
        self.launch(step, case, kernel, &arguments, workspace)?;
        let mut after = vec![0; slab.len];
        self.device.read(&whole, &mut after).map_err(text)?;
        let fault = self.take_fault()?;
        self.device.release(whole.arena);
        slab.overwrite(&after);
        slab.check_guards()?;
        Ok((
            at.iter()
                .zip(&case.args)
                .map(|(&at, a)| slab.bytes(at, a.len()).to_vec())
                .collect(),
            fault,
        ))
    }

    /// The same with an arena for each argument, for a memory checker.
    fn once_apart(
        &mut self,
        step: usize,
        case: &Case,
        kernel: &Lowered,
    ) -> Result<(Vec<Vec<u8>>, u64), String> {
        let mut arenas = Vec::new();
        for argument in &case.args {
            let arena = self.device.reserve(argument.len() as u64).map_err(text)?;
            self.device.write(&arena, argument).map_err(text)?;
            arenas.push(arena);
        }
        let arguments: Vec<_> = (0..arenas.len())
            .map(|a| arenas[case.region_of(a)])
            .collect();
        let workspace = self.device.reserve(workspace_bytes(kernel)).map_err(text)?;
        self.device.fill(&workspace, 0xff).map_err(text)?;
        self.launch(step, case, kernel, &arguments, workspace)?;
        let mut after = Vec::new();
        for argument in &arguments {
            let mut bytes = vec![0; argument.bytes as usize];
            self.device.read(argument, &mut bytes).map_err(text)?;
            after.push(bytes);
        }
        let fault = self.take_fault()?;
        for arena in arenas.iter().chain([&workspace]) {
            self.device.release(arena.arena);
        }
        Ok((after, fault))
    }

    fn launch(
        &mut self,
        step: usize,
        case: &Case,
        kernel: &Lowered,
        arguments: &[Region],
        workspace: Region,
    ) -> Result<(), String> {
        let launch = Launch {
            step,
            kernel,
            arguments,
            workspace,
        };
        self.device
            .launch(&self.program, &case.env, &launch)
            .map_err(text)?;
        self.device.end_launches(true).map_err(text)
    }

    /// The fault record, which is cleared.
    fn take_fault(&mut self) -> Result<u64, String> {
        let fault = self.device.fault().map_or(NO_FAULT, |f| {
            u64::from(f.position) << 32 | u64::from(f.value as u32)
        });
        self.device.clear_fault().map_err(text)?;
        Ok(fault)
    }
}

fn text(e: DriverError) -> String {
    e.to_string()
}
