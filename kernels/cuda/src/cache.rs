//! Compiled programs on disk, so that a model is compiled once and not at every start.
//!
//! An entry is known by a hash of everything that its code depends on: source, options, architecture and the compiler's
//! version. It holds code that will be run: so the folder belongs to the user alone, and one that others can write to is
//! refused. Entries are written beside and renamed, carry a hash of themselves, and are made anew if anything is wrong with them.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use sha2::{Digest, Sha256};

use crate::nvrtc::{self, Cubin, OPTIONS, Program, Usage};

/// Bytes that all entries together may take; the least recently used go first.
const BYTES_MAX: u64 = 1 << 30;

/// What every entry starts with; another number is another layout.
const MAGIC: &[u8; 16] = b"slabwise cubin 1";

/// A folder of compiled programs.
#[derive(Clone, Debug)]
pub struct Cache {
    folder: PathBuf,
    bytes_max: u64,
}

/// Why there is no cache.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Nothing says where it should be.
    #[error("there is no folder for compiled kernels: set SLABWISE_CACHE_DIR, XDG_CACHE_HOME or HOME")]
    Nowhere,
    /// The folder cannot be made or looked at.
    #[error("the folder of compiled kernels {}: {source}; SLABWISE_CACHE_DIR names another", folder.display())]
    Folder {
        /// Which.
        folder: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Others could put code there.
    #[error(
        "the folder of compiled kernels {} {why}: what is in it would be run, so it is not used; chmod 700 it, or name another in SLABWISE_CACHE_DIR",
        folder.display()
    )]
    NotPrivate {
        /// Which.
        folder: PathBuf,
        /// What is wrong with it.
        why: String,
    },
}

impl Cache {
    /// The user's cache: `SLABWISE_CACHE_DIR`, or `slabwise` in `XDG_CACHE_HOME` or in `~/.cache`.
    ///
    /// # Errors
    /// If there is no such folder and none can be made, or others can write to it.
    pub fn of_user() -> Result<Cache, Error> {
        let variable = |name| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
        let folder = variable("SLABWISE_CACHE_DIR")
            .or_else(|| variable("XDG_CACHE_HOME").map(|d| d.join("slabwise")))
            .or_else(|| variable("HOME").map(|d| d.join(".cache/slabwise")));
        Cache::at(folder.ok_or(Error::Nowhere)?)
    }

    /// A cache in this folder, which is made if it is not there.
    ///
    /// # Errors
    /// As [`Cache::of_user`].
    pub fn at(folder: impl Into<PathBuf>) -> Result<Cache, Error> {
        let folder = folder.into();
        private(&folder)?;
        Ok(Cache { folder, bytes_max: BYTES_MAX })
    }

    /// The same with another bound on what all entries together may take, bytes.
    #[must_use]
    pub fn with_bytes_max(mut self, bytes: u64) -> Cache {
        self.bytes_max = bytes;
        self
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The code of a program, from the disk or else compiled and kept. What cannot be kept is compiled all the same.
    ///
    /// # Errors
    /// If it has to be compiled and cannot.
    pub fn compile(&self, program: &Program) -> Result<Cubin, nvrtc::Error> {
        let key = key(program, nvrtc::version()?);
        let file = self.folder.join(format!("{key}.cubin"));
        match fs::read(&file) {
            Ok(bytes) => match decode(&bytes, &key) {
                Some(cubin) => {
                    // The time of the last use is what the oldest are chosen by.
                    let _ = fs::File::options().append(true).open(&file).and_then(|f| f.set_modified(SystemTime::now()));
                    return Ok(cubin);
                }
                None => log::warn!("{} is damaged and is compiled anew", file.display()),
            },
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => log::warn!("{}: {e}", file.display()),
        }
        let cubin = nvrtc::compile(program)?;
        if let Err(e) = self.keep(&file, &encode(&cubin, &key)) {
            log::warn!("{} cannot be kept: {e}", file.display());
        }
        Ok(cubin)
    }

    /// Writes an entry beside its place and moves it there, so that nobody ever reads half of one.
    fn keep(&self, file: &Path, bytes: &[u8]) -> io::Result<()> {
        static COUNT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
        let count = COUNT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let beside = self.folder.join(format!("writing-{}-{count}", std::process::id()));
        let written = fs::OpenOptions::new().write(true).create_new(true).open(&beside).and_then(|mut f| f.write_all(bytes));
        let moved = written.and_then(|()| fs::rename(&beside, file));
        if moved.is_err() {
            let _ = fs::remove_file(&beside);
        }
        moved.and_then(|()| self.trim(file))
    }

    /// Removes the least recently used entries beyond the bound, but never the one just written.
    fn trim(&self, newest: &Path) -> io::Result<()> {
        let mut entries: Vec<(SystemTime, u64, PathBuf)> = Vec::new();
        for entry in fs::read_dir(&self.folder)?.flatten() {
            let (path, Ok(meta)) = (entry.path(), entry.metadata()) else { continue };
            if path.extension().is_some_and(|e| e == "cubin") {
                entries.push((meta.modified().unwrap_or(SystemTime::UNIX_EPOCH), meta.len(), path));
            }
        }
        entries.sort();
        let mut total: u64 = entries.iter().map(|(_, bytes, _)| bytes).sum();
        for (_, bytes, path) in entries {
            if total <= self.bytes_max {
                break;
            }
            if path != newest {
                // Another process may have been faster.
                let _ = fs::remove_file(&path);
                total -= bytes;
            }
        }
        Ok(())
    }
}

/// Makes the folder for its user alone, or checks that it is so.
#[cfg(unix)]
fn private(folder: &Path) -> Result<(), Error> {
    use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
    let fail = |source| Error::Folder { folder: folder.into(), source };
    if let Some(above) = folder.parent() {
        fs::create_dir_all(above).map_err(fail)?;
    }
    match fs::DirBuilder::new().mode(0o700).create(folder) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(fail(e)),
        _ => {}
    }
    let meta = fs::metadata(folder).map_err(fail)?;
    if !meta.is_dir() {
        return Err(fail(io::Error::from(io::ErrorKind::NotADirectory)));
    }
    let not = |why: String| Err(Error::NotPrivate { folder: folder.into(), why });
    // Whom a process acts for is whose files it makes.
    let probe = folder.join(format!("writing-{}-owner", std::process::id()));
    let _ = fs::remove_file(&probe);
    let own = fs::OpenOptions::new().write(true).create_new(true).open(&probe).and_then(|f| f.metadata()).map_err(fail)?.uid();
    let _ = fs::remove_file(&probe);
    if meta.uid() != own {
        return not(format!("belongs to user {}, not to user {own}", meta.uid()));
    }
    let mode = meta.permissions().mode() & 0o777;
    if mode & 0o022 != 0 {
        return not(format!("can be written to by others (mode {mode:o})"));
    }
    Ok(())
}

/// Makes the folder; elsewhere than on Unix it has its user's permissions by where it lies.
#[cfg(not(unix))]
fn private(folder: &Path) -> Result<(), Error> {
    fs::create_dir_all(folder).map_err(|source| Error::Folder { folder: folder.into(), source })
}

/// What a program is known by: everything that its code depends on.
fn key(program: &Program, (major, minor): (u32, u32)) -> String {
    let mut hash = Sha256::new();
    for part in [&format!("NVRTC {major}.{minor} sm_{}", program.sm), &OPTIONS.join(" "), &program.source] {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part.as_bytes());
    }
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Layout: magic, key, hash of the rest, length of the usage, usage (a line for each function), image.
fn encode(cubin: &Cubin, key: &str) -> Vec<u8> {
    let line = |u: &Usage| format!("{} {} {} {} {}\n", u.name, u.registers, u.spill_bytes, u.stack_bytes, u.shared_bytes);
    let usage: String = cubin.usage.iter().map(line).collect();
    let mut rest = (usage.len() as u64).to_le_bytes().to_vec();
    rest.extend_from_slice(usage.as_bytes());
    rest.extend_from_slice(&cubin.image);
    [MAGIC.as_slice(), key.as_bytes(), Sha256::digest(&rest).as_slice(), &rest].concat()
}

/// The entry's cubin if it is whole and of this key.
fn decode(bytes: &[u8], key: &str) -> Option<Cubin> {
    let rest = bytes.strip_prefix(MAGIC.as_slice())?.strip_prefix(key.as_bytes())?;
    let (hash, rest) = rest.split_at_checked(32)?;
    if Sha256::digest(rest).as_slice() != hash {
        return None;
    }
    let (length, rest) = rest.split_at_checked(8)?;
    let (usage, image) = rest.split_at_checked(u64::from_le_bytes(length.try_into().ok()?).try_into().ok()?)?;
    let usage = std::str::from_utf8(usage).ok()?.lines().map(|line| {
        let mut words = line.split(' ');
        let name = words.next()?.to_string();
        let mut number = || words.next()?.parse().ok();
        Some(Usage { name, registers: number()?, spill_bytes: number()?, stack_bytes: number()?, shared_bytes: number()? })
    });
    Some(Cubin { usage: usage.collect::<Option<_>>()?, image: image.to_vec() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cubin() -> Cubin {
        let usage = Usage { name: "k".into(), registers: 32, spill_bytes: 4, stack_bytes: 8, shared_bytes: 1024 };
        Cubin { image: (0..200).collect(), usage: vec![usage] }
    }

    #[test]
    fn an_entry_is_read_as_written_and_refused_if_one_bit_is_not() {
        let key = key(&Program { source: "x".into(), sm: 90 }, (13, 0));
        let bytes = encode(&cubin(), &key);
        assert_eq!(decode(&bytes, &key), Some(cubin()));
        for at in 0..bytes.len() {
            let mut broken = bytes.clone();
            broken[at] ^= 1 << (at % 8);
            assert_eq!(decode(&broken, &key), None, "byte {at}");
            assert_eq!(decode(&bytes[..at], &key), None, "cut at {at}");
        }
        assert_eq!(decode(&bytes, &"0".repeat(64)), None);
    }

    #[test]
    fn a_key_follows_everything_that_code_depends_on() {
        let program = |source: &str, sm| Program { source: source.into(), sm };
        let base = key(&program("x", 90), (13, 0));
        assert_eq!(base.len(), 64);
        assert_eq!(base, key(&program("x", 90), (13, 0)));
        for other in [key(&program("y", 90), (13, 0)), key(&program("x", 80), (13, 0)), key(&program("x", 90), (13, 1))] {
            assert_ne!(base, other);
        }
    }

    #[test]
    fn the_least_recently_used_go_first() {
        let folder = tempfile::tempdir().expect("a folder");
        let cache = Cache::at(folder.path().join("cache")).expect("a private folder").with_bytes_max(250);
        let file = |name: &str| cache.folder().join(format!("{name}.cubin"));
        for (name, age) in [("old", 30), ("older", 60), ("new", 0)] {
            cache.keep(&file(name), &[0; 100]).expect("it is written");
            let past = SystemTime::now() - std::time::Duration::from_secs(age);
            if file(name).exists() {
                fs::File::options().append(true).open(file(name)).and_then(|f| f.set_modified(past)).expect("a time");
            }
        }
        assert!(file("new").exists() && file("old").exists() && !file("older").exists());
        let left = fs::read_dir(cache.folder()).expect("a folder").count();
        assert_eq!(left, 2, "nothing half written stays");
    }

    #[cfg(unix)]
    #[test]
    fn a_folder_that_others_can_write_to_is_refused() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().expect("a folder");
        let made = folder.path().join("made");
        Cache::at(&made).expect("it is made");
        assert_eq!(fs::metadata(&made).expect("a folder").permissions().mode() & 0o777, 0o700);
        for (mode, refused) in [(0o777, true), (0o770, true), (0o702, true), (0o755, false), (0o700, false)] {
            fs::set_permissions(&made, fs::Permissions::from_mode(mode)).expect("own folder");
            let opened = Cache::at(&made);
            assert_eq!(opened.is_err(), refused, "{mode:o}");
            if let Err(e) = opened {
                assert!(e.to_string().contains("SLABWISE_CACHE_DIR"), "{e}");
            }
        }
    }
}
