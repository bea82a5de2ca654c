//! The compiler and its cache, where NVRTC is installed. With `CI` set it must be.

use slabwise_cuda::Function;
use slabwise_cuda::cache::Cache;
use slabwise_cuda::nvrtc::{self, Error, Program};

/// Whether there is a compiler; says so if not.
fn compiler() -> bool {
    match nvrtc::version() {
        Ok(_) => true,
        Err(e) => {
            assert!(std::env::var_os("CI").is_none(), "{e}");
            eprintln!("skipped: {e}");
            false
        }
    }
}

fn add(name: &str) -> Function {
    let source = format!(
        "extern \"C\" __global__ void {name}(const __grid_constant__ Words<3> p) {{\n    \
         __shared__ float row[256];\n    row[threadIdx.x] = ((const float*)p.w[0])[threadIdx.x];\n    __syncthreads();\n    \
         ((float*)p.w[1])[threadIdx.x] = row[255 - threadIdx.x] + (float)p.w[2];\n}}\n"
    );
    Function { name: name.into(), source }
}

const PRELUDE: &str = "template <int N> struct Words { unsigned long long w[N]; };\n";

#[test]
fn several_functions_are_compiled_for_every_architecture() {
    if !compiler() {
        return;
    }
    for sm in [80, 90, 100] {
        let made = nvrtc::compile(&Program::new(PRELUDE, &[add("a"), add("b")], sm)).expect("the source is fine");
        assert!(made.image.starts_with(b"\x7fELF"), "sm_{sm}");
        let mut names: Vec<&str> = made.usage.iter().map(|u| u.name.as_str()).collect();
        names.sort_unstable();
        assert_eq!(names, ["a", "b"]);
        for usage in &made.usage {
            assert!((4..=255).contains(&usage.registers), "{usage:?}");
            assert_eq!((usage.spill_bytes, usage.shared_bytes), (0, 1024), "{usage:?}");
        }
    }
}

#[test]
fn a_refused_source_is_saved_with_line_numbers() {
    if !compiler() {
        return;
    }
    let broken = Function { name: "broken".into(), source: "extern \"C\" __global__ void broken() { undeclared = 1; }".into() };
    let error = nvrtc::compile(&Program::new(PRELUDE, &[broken], 90)).expect_err("it names what there is not");
    let Error::Refused { source_file: Some(file), log, .. } = &error else { panic!("{error}") };
    assert!(log.contains("undeclared") && error.to_string().contains(&file.display().to_string()), "{error}");
    let saved = std::fs::read_to_string(file).expect("the saved source");
    assert!(saved.lines().any(|l| l.trim_start().starts_with("3  ") && l.contains("undeclared")), "{saved}");
    std::fs::remove_file(file).expect("it was there");
}

#[test]
fn a_damaged_or_foreign_entry_is_compiled_anew() {
    if !compiler() {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let cache = Cache::at(folder.path().join("cubins")).expect("a private folder");
    let program = Program::new(PRELUDE, &[add("kept")], 90);
    let first = cache.compile(&program).expect("the source is fine");
    let entries = || std::fs::read_dir(cache.folder()).expect("a folder").flatten().map(|e| e.path()).collect::<Vec<_>>();
    let [entry] = &entries()[..] else { panic!("one entry") };
    let whole = std::fs::read(entry).expect("an entry");
    assert_eq!(cache.compile(&program).expect("it is kept"), first);
    let damages: [fn(&mut Vec<u8>); 4] =
        [Vec::clear, |b| b.truncate(b.len() / 2), |b| b[200] ^= 4, |b| b.splice(0..16, *b"somebody else's ").for_each(drop)];
    for damage in damages {
        let mut bytes = whole.clone();
        damage(&mut bytes);
        std::fs::write(entry, &bytes).expect("own folder");
        assert_eq!(cache.compile(&program).expect("it is compiled anew"), first);
        assert_eq!(std::fs::read(entry).expect("an entry"), whole);
    }
}
