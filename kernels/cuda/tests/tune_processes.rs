//! Processes that time the same product at once, over a driver without a device.

mod common;
mod products;

use std::path::PathBuf;
use std::sync::Mutex;

use products::library::{algorithm, installed, picks_in, target, tuner};
use products::{matmul, strided};
use slabwise_cuda::Choice;
use slabwise_kernels::size::Env;
use slabwise_kernels::spec::Spec;

const NOT_SUPPORTED: i32 = 15;

/// A product that is timed.
fn product() -> Spec {
    matmul(&[48, 40], 64, strided(0, &[64, 1]), strided(0, &[40, 1]))
}

fn choose(folder: &tempfile::TempDir) -> Choice {
    tuner(picks_in(folder))
        .choose(&[(&product(), target())], &Env::default())
        .remove(0)
}

/// The only stored choice of a folder.
fn stored(folder: &tempfile::TempDir) -> PathBuf {
    let files = std::fs::read_dir(folder.path().join("cache")).expect("a folder");
    let mut picks: Vec<PathBuf> = files
        .map(|entry| entry.expect("an entry").path())
        .filter(|path| path.extension().is_some_and(|e| e == "pick"))
        .collect();
    assert_eq!(picks.len(), 1, "{picks:?}");
    picks.remove(0)
}

/// A logger that, when the times of a product are known and nothing is stored yet, does what another
/// process could do then: it copies a file.
struct OtherProcess(Mutex<Option<[PathBuf; 2]>>);

static OTHER: OtherProcess = OtherProcess(Mutex::new(None));

impl log::Log for OtherProcess {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        if record.args().to_string().starts_with("product of ")
            && let Some([from, to]) = self.0.lock().expect("no panic").take()
        {
            assert!(!to.exists(), "the choice is not stored yet");
            std::fs::copy(from, to).expect("own folder");
        }
    }

    fn flush(&self) {}
}

/// The choice that is stored first is that of all processes, because products of a library's kernels
/// may have other bits. One that the tuner has not timed is left to the processes after it.
#[test]
fn the_choice_that_is_stored_first_is_that_of_all_processes() {
    let Some(driver) = installed() else { return };
    log::set_logger(&OTHER).expect("there is no other");
    log::set_max_level(log::LevelFilter::Info);
    let faster = |name: &str| {
        driver.cost("", 1_000_000);
        driver.cost(name, 500_000);
    };
    let folder = || tempfile::tempdir().expect("a folder");
    let (first, second) = (folder(), folder());
    let of_library = Choice::Library(algorithm(21, 0));
    faster("cublaslt_21");
    assert_eq!(choose(&first), of_library);
    driver.cost("", 1_000_000);
    let own = choose(&second);
    assert!(matches!(own, Choice::Own(_)), "{own:?}");
    // The process of `third` would choose its own kernel, and another process is faster.
    let third = folder();
    let file = |folder: &tempfile::TempDir| {
        let name = stored(&first);
        folder
            .path()
            .join("cache")
            .join(name.file_name().expect("a name"))
    };
    let meanwhile = |folder: &tempfile::TempDir| {
        *OTHER.0.lock().expect("no panic") = Some([stored(&first), file(folder)]);
    };
    meanwhile(&third);
    assert_eq!(choose(&third), of_library);
    assert!(OTHER.0.lock().expect("no panic").is_none(), "it was copied");
    assert_eq!(choose(&third), of_library, "in the process after it");
    // A kernel whose first run takes so long is not timed.
    let fourth = folder();
    driver.cost("cublaslt_21", 100_000_000);
    meanwhile(&fourth);
    assert_eq!(choose(&fourth), own);
    assert_eq!(choose(&fourth), of_library, "in the process after it");
    // One that the library refuses is replaced.
    driver.fail("cublasLtMatmulAlgoCheck", 0, NOT_SUPPORTED);
    assert_eq!(choose(&fourth), own);
    assert_eq!(choose(&fourth), own, "in the process after it");
}
