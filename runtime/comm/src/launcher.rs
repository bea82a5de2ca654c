//! The launcher that started this process, from its environment variables.

use crate::{Error, Result};

/// The family of the MPI library that a launcher's processes must load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// MPICH and libraries of its binary interface: Intel MPI, MVAPICH, Cray MPICH.
    Mpich,
    /// Open MPI.
    OpenMpi,
}

/// The process's place among those that its launcher started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// The number of the process.
    pub rank: usize,
    /// The number of processes.
    pub size: usize,
}

/// The launcher that started this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Launcher {
    /// No launcher of several processes.
    None,
    /// A launcher of MPI processes. The place is unknown to some, and the family to others.
    Mpi {
        family: Option<Family>,
        place: Option<Place>,
        /// The variable that gave it away.
        variable: &'static str,
    },
    /// torchrun or a scheduler that sets its variables.
    Torchrun(Place),
}

/// Launchers by their variables of rank and size. Open MPI's come before those of PMIx, which it
/// uses as well.
const LAUNCHERS: &[(&str, &str, Option<Family>)] = &[
    (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        Some(Family::OpenMpi),
    ),
    ("PMI_RANK", "PMI_SIZE", Some(Family::Mpich)),
    ("PMIX_RANK", "SLURM_NTASKS", Some(Family::OpenMpi)),
];

/// Finds the launcher.
///
/// # Errors
/// If a variable is no number, or is missing beside another.
pub(crate) fn launcher(lookup: &dyn Fn(&str) -> Option<String>) -> Result<Launcher> {
    let lookup = |name: &str| lookup(name).filter(|value| !value.trim().is_empty());
    if let Some(world) = lookup("SLABWISE_WORLD") {
        return match world.as_str() {
            "alone" => Ok(Launcher::None),
            _ => Err(Error::Join(format!(
                "SLABWISE_WORLD is {world:?}, but can only be \"alone\", which ignores the \
                 launcher; ranks that are threads are made by World::local"
            ))),
        };
    }
    let number = |name: &str| -> Result<Option<usize>> {
        let Some(text) = lookup(name) else {
            return Ok(None);
        };
        let wrong = |_| Error::Join(format!("{name} is {text:?}, which is not a number"));
        text.trim().parse().map(Some).map_err(wrong)
    };
    let place = |rank: &str, size: &str| -> Result<Option<Place>> {
        match (number(rank)?, number(size)?) {
            (Some(at), Some(n)) if at >= n => Err(Error::Join(format!(
                "{rank} is {at}, but must be below {size}, which is {n}"
            ))),
            (Some(rank), Some(size)) => Ok(Some(Place { rank, size })),
            _ => Ok(None),
        }
    };
    for &(rank, size, family) in LAUNCHERS {
        if lookup(rank).is_some() {
            return Ok(Launcher::Mpi {
                family,
                place: place(rank, size)?,
                variable: rank,
            });
        }
    }
    // srun without an MPI plugin starts processes that MPI cannot connect. A single task, and a
    // shell inside of an allocation, are alone.
    if let Some(place) = place("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")?
        && place.size > 1
    {
        return Ok(Launcher::Mpi {
            family: None,
            place: Some(place),
            variable: "SLURM_PROCID",
        });
    }
    if let Some(rank) = number("RANK")? {
        // A single RANK is a variable of some other program.
        if let Some(place) = place("RANK", "WORLD_SIZE")? {
            if lookup("MASTER_ADDR").is_none() && place.size > 1 {
                return Err(Error::Join(format!(
                    "RANK is {rank} and WORLD_SIZE {}, but MASTER_ADDR is not set",
                    place.size
                )));
            }
            return Ok(Launcher::Torchrun(place));
        }
    }
    Ok(Launcher::None)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(variables: &[(&str, &str)]) -> Result<Launcher> {
        launcher(&|name| {
            let (_, value) = variables.iter().find(|(known, _)| *known == name)?;
            Some(value.to_string())
        })
    }

    fn mpi(family: Option<Family>, rank: usize, size: usize, variable: &'static str) -> Launcher {
        Launcher::Mpi {
            family,
            place: Some(Place { rank, size }),
            variable,
        }
    }

    #[test]
    fn launchers_are_detected_by_their_variables() {
        let mpich = [("PMI_RANK", "1"), ("PMI_SIZE", "4")];
        assert_eq!(of(&mpich), Ok(mpi(Some(Family::Mpich), 1, 4, "PMI_RANK")));
        let open = [
            ("PMIX_RANK", "2"),
            ("OMPI_COMM_WORLD_RANK", "2"),
            ("OMPI_COMM_WORLD_SIZE", "3"),
        ];
        let found = mpi(Some(Family::OpenMpi), 2, 3, "OMPI_COMM_WORLD_RANK");
        assert_eq!(of(&open), Ok(found));
        let slurm = [("SLURM_PROCID", "0"), ("SLURM_STEP_NUM_TASKS", "2")];
        assert_eq!(of(&slurm), Ok(mpi(None, 0, 2, "SLURM_PROCID")));
        let torchrun = [("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "node0")];
        assert_eq!(
            of(&torchrun),
            Ok(Launcher::Torchrun(Place { rank: 1, size: 2 }))
        );
        for alone in [
            &[][..],
            &[("SLURM_PROCID", "0"), ("SLURM_STEP_NUM_TASKS", "1")],
            &[("RANK", "7")],
            &[
                ("PMI_RANK", "0"),
                ("PMI_SIZE", "2"),
                ("SLABWISE_WORLD", "alone"),
            ],
        ] {
            assert_eq!(of(alone), Ok(Launcher::None), "{alone:?}");
        }
    }

    #[test]
    fn wrong_variables_are_named() {
        for (variables, says) in [
            (
                &[("PMI_RANK", "one"), ("PMI_SIZE", "2")][..],
                "PMI_RANK is \"one\"",
            ),
            (
                &[("PMI_RANK", "2"), ("PMI_SIZE", "2")],
                "PMI_RANK is 2, but must be below",
            ),
            (&[("SLABWISE_WORLD", "local:4")], "World::local"),
            (&[("RANK", "0"), ("WORLD_SIZE", "2")], "MASTER_ADDR"),
        ] {
            let told = of(variables).expect_err(says).to_string();
            assert!(told.contains(says), "{told}");
        }
    }
}
