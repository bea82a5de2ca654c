//! The launcher of this process, as its environment shows it.

use std::fmt;

use crate::JoinError;

/// A kind of launcher.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Launcher {
    /// MPICH's `mpiexec`, or another one that speaks its process management interface (Intel MPI,
    /// MVAPICH, `srun --mpi=pmi2`).
    Mpich,
    /// Open MPI's `mpiexec`, or another one of PMIx (`srun --mpi=pmix`).
    OpenMpi,
}

impl fmt::Display for Launcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Launcher::Mpich => "MPICH's mpiexec",
            Launcher::OpenMpi => "Open MPI's mpiexec",
        })
    }
}

/// A process of a launcher.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launched {
    /// The launcher.
    pub launcher: Launcher,
    /// The number of this process, from 0.
    pub rank: usize,
    /// The number of processes.
    pub ranks: usize,
}

impl Launched {
    /// This process; `None` if no launcher of MPI started it.
    ///
    /// # Errors
    /// If a launcher started it that is for other transports, or a variable cannot be read.
    pub fn detect() -> Result<Option<Launched>, JoinError> {
        Launched::of(&|name| std::env::var(name).ok())
    }

    /// The process with these environment variables.
    ///
    /// # Errors
    /// As [`Launched::detect`].
    pub fn of(variable: &dyn Fn(&str) -> Option<String>) -> Result<Option<Launched>, JoinError> {
        const NAMES: [(Launcher, &str, &[&str]); 4] = [
            (
                Launcher::OpenMpi,
                "OMPI_COMM_WORLD_RANK",
                &["OMPI_COMM_WORLD_SIZE"],
            ),
            (
                Launcher::OpenMpi,
                "PMIX_RANK",
                &["OMPI_COMM_WORLD_SIZE", "SLURM_NTASKS"],
            ),
            (Launcher::Mpich, "PMI_RANK", &["PMI_SIZE", "SLURM_NTASKS"]),
            (Launcher::Mpich, "MPI_LOCALRANKID", &["MPI_LOCALNRANKS"]),
        ];
        let number = |name: &'static str| -> Result<Option<usize>, JoinError> {
            let Some(value) = variable(name) else {
                return Ok(None);
            };
            let number = value.trim().parse().map_err(|_| JoinError::Variable {
                variable: name,
                value,
                expected: "a number",
            });
            number.map(Some)
        };
        for (launcher, rank, sizes) in NAMES {
            let Some(rank) = number(rank)? else { continue };
            for size in sizes {
                if let Some(ranks) = number(size)? {
                    return Ok(Some(Launched {
                        launcher,
                        rank,
                        ranks,
                    }));
                }
            }
        }
        let found = (number("RANK")?, number("WORLD_SIZE")?);
        match (found, variable("MASTER_ADDR")) {
            ((Some(rank), Some(ranks)), Some(_)) if ranks > 1 => {
                Err(JoinError::NoMpi { rank, ranks })
            }
            _ => Ok(None),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(variables: &[(&str, &str)]) -> Result<Option<Launched>, JoinError> {
        Launched::of(&|name| {
            let found = variables.iter().find(|(n, _)| *n == name);
            found.map(|(_, value)| value.to_string())
        })
    }

    #[test]
    fn launchers_are_told_apart() {
        let found = |variables| of(variables).expect("readable");
        assert_eq!(found(&[]), None);
        let mpich = found(&[("PMI_RANK", "2"), ("PMI_SIZE", "4")]).expect("launched");
        assert_eq!(
            (mpich.launcher, mpich.rank, mpich.ranks),
            (Launcher::Mpich, 2, 4)
        );
        let open = found(&[
            ("OMPI_COMM_WORLD_RANK", "1"),
            ("OMPI_COMM_WORLD_SIZE", "2"),
            ("PMIX_RANK", "1"),
        ]);
        let open = open.expect("launched");
        assert_eq!(
            (open.launcher, open.rank, open.ranks),
            (Launcher::OpenMpi, 1, 2)
        );
        let slurm = found(&[("PMIX_RANK", "3"), ("SLURM_NTASKS", "8")]).expect("launched");
        assert_eq!(
            (slurm.launcher, slurm.rank, slurm.ranks),
            (Launcher::OpenMpi, 3, 8)
        );
    }

    #[test]
    fn torchrun_is_refused_in_words_and_numbers_are_checked() {
        let torch = [
            ("RANK", "1"),
            ("WORLD_SIZE", "2"),
            ("MASTER_ADDR", "localhost"),
        ];
        let error = of(&torch).expect_err("no MPI").to_string();
        assert!(
            error.contains("rank 1 of 2") && error.contains("mpiexec"),
            "{error}"
        );
        let error = of(&[("PMI_RANK", "two"), ("PMI_SIZE", "4")]).expect_err("no number");
        assert_eq!(error.to_string(), "PMI_RANK is \"two\", not a number");
    }
}
