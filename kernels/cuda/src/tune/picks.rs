//! The kernel choices of the tuner, in memory and on disk, where each is a file of its own.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use super::Choice;
use crate::cache::Cache;
use crate::cublaslt::Algorithm;
use crate::cudnn;

/// Kernel choices by a hash of everything that they depend on: the specs, their bounds, the
/// candidates, the device, and the versions of driver, compiler and library.
#[derive(Debug, Default)]
pub struct Picks {
    known: Mutex<HashMap<String, Choice>>,
    cache: Option<Cache>,
}

impl Picks {
    /// The choices of the process, stored in the user's cache if it is usable.
    pub fn of_process() -> Arc<Picks> {
        let made = || {
            Arc::new(Picks {
                known: Mutex::default(),
                cache: Cache::of_user().ok(),
            })
        };
        PROCESS.get_or_init(made).clone()
    }

    /// Clears the choices of the process and detaches them from the disk, so that a test starts
    /// empty.
    #[cfg(feature = "emulator")]
    pub(crate) fn forget_all() {
        PROCESS.get_or_init(Arc::default).map().clear();
    }

    /// Choices stored in this folder.
    pub fn at(cache: Cache) -> Arc<Picks> {
        Arc::new(Picks {
            known: Mutex::default(),
            cache: Some(cache),
        })
    }

    fn map(&self) -> MutexGuard<'_, HashMap<String, Choice>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The process's choice.
    pub(super) fn in_memory(&self, key: &str) -> Option<Choice> {
        self.map().get(key).cloned()
    }

    /// Records a choice for the rest of the process, unless another thread has done so, and returns
    /// the recorded one.
    pub(super) fn remember(&self, key: &str, choice: &Choice) -> Choice {
        let mut known = self.map();
        known.entry(key.into()).or_insert(choice.clone()).clone()
    }

    /// Removes a choice that cannot be used any more.
    pub(super) fn forget(&self, key: &str) {
        self.map().remove(key);
    }

    /// The choice of another process.
    pub(super) fn on_disk(&self, key: &str) -> Option<Choice> {
        let rest = self.cache.as_ref()?.pick(key)?;
        let choice = decode(&rest);
        if choice.is_none() {
            log::warn!("a stored kernel choice cannot be read; it is not used");
        }
        choice
    }

    /// Stores a choice on disk, in place of one that cannot be used and none else, and returns the
    /// stored one: another process may have stored its choice first.
    pub(super) fn store(&self, key: &str, choice: &Choice, unusable: Option<&Choice>) -> Choice {
        let usable = |rest: &[u8]| decode(rest).filter(|there| Some(there) != unusable);
        let stored = self.cache.as_ref().and_then(|cache| {
            cache.store_pick(key, encode(choice).as_bytes(), |rest| {
                usable(rest).is_some()
            })
        });
        stored
            .and_then(|rest| usable(&rest))
            .unwrap_or_else(|| choice.clone())
    }
}

/// The choices of the process.
static PROCESS: OnceLock<Arc<Picks>> = OnceLock::new();

/// A choice as a line of text.
fn encode(choice: &Choice) -> String {
    match choice {
        Choice::Ranked => "ranked".into(),
        Choice::Own(name) => format!("own {name}"),
        Choice::Library(Algorithm { words, workspace }) => {
            let words: Vec<String> = words.iter().map(|word| format!("{word:x}")).collect();
            format!("cublaslt {workspace} {}", words.join(" "))
        }
        Choice::Cudnn(cudnn::Algorithm {
            number,
            math,
            workspace,
        }) => format!("cudnn {workspace} {number} {math}"),
    }
}

/// Parses the choice in a line.
fn decode(line: &[u8]) -> Option<Choice> {
    let line = str::from_utf8(line).ok()?;
    if let Some(name) = line.strip_prefix("own ") {
        return Some(Choice::Own(name.into()));
    }
    if let Some(numbers) = line.strip_prefix("cudnn ") {
        let [workspace, number, math] = numbers.split(' ').collect::<Vec<_>>()[..] else {
            return None;
        };
        let (number, math, workspace) = (
            number.parse().ok()?,
            math.parse().ok()?,
            workspace.parse().ok()?,
        );
        return Some(Choice::Cudnn(cudnn::Algorithm {
            number,
            math,
            workspace,
        }));
    }
    let mut numbers = line.strip_prefix("cublaslt ")?.split(' ');
    let workspace = numbers.next()?.parse().ok()?;
    let words: Vec<u64> = numbers
        .map(|word| u64::from_str_radix(word, 16))
        .collect::<Result<_, _>>()
        .ok()?;
    Some(Choice::Library(Algorithm {
        words: words.try_into().ok()?,
        workspace,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_round_trip_or_are_rejected() {
        let algorithm = Algorithm {
            words: [u64::MAX, 1, 0, 3, 4, 5, 1 << 63, 7],
            workspace: 1 << 20,
        };
        let of_cudnn = cudnn::Algorithm {
            number: 1,
            math: 3,
            workspace: 1 << 33,
        };
        for choice in [
            Choice::Own("gemm_64x64 in 3 parts".into()),
            Choice::Library(algorithm),
            Choice::Cudnn(of_cudnn),
        ] {
            assert_eq!(decode(encode(&choice).as_bytes()), Some(choice));
        }
        for wrong in [
            "",
            "own",
            "ranked",
            "cublaslt",
            "cublaslt 1 2 3",
            "cublaslt x 1 2 3 4 5 6 7 8",
            "cublaslt 1 1 2 3 4 5 6 7 8 9",
            "cudnn 1 2",
            "cudnn 1 2 3 4",
            "cudnn -1 2 3",
        ] {
            assert_eq!(decode(wrong.as_bytes()), None, "{wrong:?}");
        }
        assert_eq!(decode(b"own \xff"), None);
    }

    /// Two threads that time a product at once both get the choice of the first.
    #[test]
    fn the_first_choice_of_a_process_stays() {
        let picks = Picks::default();
        let [first, second] = ["gemm_64x64", "gemm_32x32"].map(|name| Choice::Own(name.into()));
        assert_eq!(picks.remember("key", &first), first);
        assert_eq!(picks.remember("key", &second), first);
        assert_eq!(picks.in_memory("key"), Some(first));
        picks.forget("key");
        assert_eq!(picks.remember("key", &second), second);
    }

    /// Each choice has a file of its own, so that processes that tune at once do not lose each
    /// other's.
    #[test]
    fn processes_store_choices_of_different_keys_side_by_side() {
        let folder = tempfile::tempdir().expect("a folder");
        let picks = || Picks::at(Cache::at(folder.path().join("cache")).expect("a private folder"));
        let key = |process: usize, at: usize| crate::cache::hash(&[&format!("{process} {at}")]);
        let choice = |at: usize| Choice::Own(format!("gemm_{at}"));
        std::thread::scope(|scope| {
            for process in 0..4 {
                scope.spawn(move || {
                    let own = picks();
                    for at in 0..20 {
                        assert_eq!(own.on_disk(&key(process, at)), None);
                        own.store(&key(process, at), &choice(at), None);
                    }
                });
            }
        });
        for process in 0..4 {
            for at in 0..20 {
                assert_eq!(picks().on_disk(&key(process, at)), Some(choice(at)));
            }
        }
    }

    /// Two processes that time a product at once both get the choice of the first, and so do those
    /// after them.
    #[test]
    fn the_first_choice_of_processes_stays() {
        let folder = tempfile::tempdir().expect("a folder");
        let picks = || Picks::at(Cache::at(folder.path().join("cache")).expect("a private folder"));
        let key = crate::cache::hash(&["a key"]);
        let [first, second] = ["gemm_64x64", "gemm_32x32"].map(|name| Choice::Own(name.into()));
        let processes = [picks(), picks()];
        for process in &processes {
            assert_eq!(process.on_disk(&key), None, "neither has stored any");
        }
        assert_eq!(processes[0].store(&key, &first, None), first);
        assert_eq!(processes[1].store(&key, &second, None), first);
        assert_eq!(picks().on_disk(&key), Some(first.clone()));
        // Only a process that cannot use it stores another.
        assert_eq!(picks().store(&key, &second, Some(&first)), second);
        assert_eq!(picks().on_disk(&key), Some(second));
    }

    #[test]
    fn choices_are_stored_and_damaged_or_foreign_ones_rejected() {
        let folder = tempfile::tempdir().expect("a folder");
        let picks = || Picks::at(Cache::at(folder.path().join("cache")).expect("a private folder"));
        let (key, other) = (
            crate::cache::hash(&["a key"]),
            crate::cache::hash(&["another"]),
        );
        let choice = Choice::Own("gemm_64x64".into());
        let first = picks();
        first.remember(&key, &choice);
        assert_eq!(
            (first.in_memory(&key), first.on_disk(&key)),
            (Some(choice.clone()), None),
            "remembered but not stored"
        );
        first.store(&key, &choice, None);
        assert_eq!(
            (picks().in_memory(&key), picks().on_disk(&key)),
            (None, Some(choice.clone()))
        );
        let file = folder.path().join("cache").join(format!("{key}.pick"));
        let whole = std::fs::read(&file).expect("an entry");
        picks().store(&other, &choice, None);
        let foreign = std::fs::read(folder.path().join("cache").join(format!("{other}.pick")))
            .expect("an entry");
        let mut damaged = whole.clone();
        *damaged.last_mut().expect("it is not empty") ^= 1;
        for bytes in [
            &whole[..whole.len() - 1],
            &whole[..20],
            b"",
            &damaged,
            &foreign,
            &vec![0; 10_000],
        ] {
            std::fs::write(&file, bytes).expect("own folder");
            assert_eq!(picks().on_disk(&key), None);
            assert_eq!(picks().store(&key, &choice, None), choice);
            assert_eq!(std::fs::read(&file).expect("an entry"), whole);
        }
        std::fs::remove_file(&file)
            .and_then(|()| std::fs::create_dir(&file))
            .expect("own folder");
        assert_eq!(picks().on_disk(&key), None);
        assert_eq!(picks().store(&key, &choice, None), choice, "without a file");
        let files = std::fs::read_dir(folder.path().join("cache")).expect("a folder");
        assert_eq!(files.count(), 2, "nothing half written stays");
    }
}
