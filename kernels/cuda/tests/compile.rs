//! The compiler and its cache, where NVRTC is installed. With `CI` set it must be.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;

use slabwise_cuda::cache::Cache;
use slabwise_cuda::compiler::Compiler;
use slabwise_cuda::nvrtc::{self, Architecture, Cubin, Error, PrecompiledHeaders, Program};
use slabwise_cuda::{Function, PRELUDE as WHOLE_PRELUDE};

/// Whether there is a compiler; prints a line if not.
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
    Function {
        name: name.into(),
        source,
    }
}

const PRELUDE: &str = "template <int N> struct Words { unsigned long long w[N]; };\n";

#[test]
fn several_functions_are_compiled_for_every_architecture() {
    if !compiler() {
        return;
    }
    // A compiler older than 12.8 makes PTX for a device of sm_100.
    let is_known = |sm: &u32| nvrtc::architecture(*sm) == Ok(Architecture::Machine(*sm));
    assert!(is_known(&80) && is_known(&90));
    for sm in [80, 90, 100].into_iter().filter(is_known) {
        let made = nvrtc::compile(&Program::new(PRELUDE, &[add("a"), add("b")], sm), None)
            .expect("the source is fine");
        assert!(made.image.starts_with(b"\x7fELF"), "sm_{sm}");
        let mut names: Vec<&str> = made.usage.iter().map(|u| u.name.as_str()).collect();
        names.sort_unstable();
        assert_eq!(names, ["a", "b"]);
        for usage in &made.usage {
            assert!((4..=255).contains(&usage.registers), "{usage:?}");
            assert_eq!(
                (usage.spill_bytes, usage.shared_bytes),
                (0, 1024),
                "{usage:?}"
            );
        }
    }
}

#[test]
fn a_refused_source_is_saved_with_line_numbers() {
    if !compiler() {
        return;
    }
    let broken = Function {
        name: "broken".into(),
        source: "extern \"C\" __global__ void broken() { undeclared = 1; }".into(),
    };
    let error = nvrtc::compile(&Program::new(PRELUDE, &[broken], 90), None)
        .expect_err("it uses an undefined name");
    let Error::Refused {
        source_file: Some(file),
        log,
        ..
    } = &error
    else {
        panic!("{error}")
    };
    assert!(
        log.contains("undeclared") && error.to_string().contains(&file.display().to_string()),
        "{error}"
    );
    let saved = std::fs::read_to_string(file).expect("the saved source");
    assert!(
        saved
            .lines()
            .any(|l| l.trim_start().starts_with("3  ") && l.contains("undeclared")),
        "{saved}"
    );
    std::fs::remove_file(file).expect("it was there");
}

/// A program for each function of these names.
fn each(names: &[&str]) -> Vec<Program> {
    let functions: Vec<Function> = names.iter().map(|name| add(name)).collect();
    Program::each(PRELUDE, &functions, 90)
}

/// The code of these functions in a process that has compiled nothing yet, the number of functions
/// that NVRTC compiled, and the number that were read.
fn anew(cache: &Cache, names: &[&str]) -> (Vec<Arc<Cubin>>, usize, usize) {
    let compiler = Compiler::default();
    let code = compiler
        .compile(Some(cache), &each(names))
        .expect("the source is fine");
    (code, compiler.compiled(), compiler.read())
}

fn entries(cache: &Cache) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = std::fs::read_dir(cache.folder())
        .expect("a folder")
        .flatten()
        .map(|e| e.path())
        .collect();
    files.sort();
    files
}

#[test]
fn only_a_damaged_or_foreign_entry_is_recompiled() {
    if !compiler() {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let cache = Cache::at(folder.path().join("cubins")).expect("a private folder");
    let names = ["a", "b", "c"];
    let (first, compiled, read) = anew(&cache, &names);
    assert_eq!((compiled, read), (3, 0));
    for (code, name) in first.iter().zip(names) {
        assert_eq!(
            code.usage
                .iter()
                .map(|u| u.name.as_str())
                .collect::<Vec<_>>(),
            [name]
        );
    }
    assert_eq!(anew(&cache, &names), (first.clone(), 0, 3));
    let files = entries(&cache);
    assert_eq!(files.len(), 3, "an entry for each function");
    let whole = std::fs::read(&files[1]).expect("an entry");
    let damages: [fn(&mut Vec<u8>); 4] = [
        Vec::clear,
        |b| b.truncate(b.len() / 2),
        |b| b[200] ^= 4,
        |b| b.splice(0..16, *b"somebody else's ").for_each(drop),
    ];
    for damage in damages {
        let mut bytes = whole.clone();
        damage(&mut bytes);
        std::fs::write(&files[1], &bytes).expect("own folder");
        assert_eq!(anew(&cache, &names), (first.clone(), 1, 2));
        assert_eq!(std::fs::read(&files[1]).expect("an entry"), whole);
    }
    std::fs::copy(&files[0], &files[1]).expect("own folder");
    assert_eq!(
        anew(&cache, &names),
        (first, 1, 2),
        "another function's entry"
    );
}

#[test]
fn functions_are_compiled_once_per_process() {
    if !compiler() {
        return;
    }
    let shared = Compiler::default();
    let code = |names: &[&str]| {
        shared
            .compile(None, &each(names))
            .expect("the source is fine")
    };
    let first = code(&["a", "b", "a"]);
    assert_eq!((shared.compiled(), first.len()), (2, 3));
    assert!(Arc::ptr_eq(&first[0], &first[2]));
    let second = code(&["c", "b"]);
    assert_eq!(shared.compiled(), 3, "one is new");
    assert!(Arc::ptr_eq(&first[1], &second[1]));
    std::thread::scope(|scope| {
        for names in [["d", "e", "f"], ["f", "d", "e"], ["e", "f", "a"]] {
            scope.spawn(move || code(&names));
        }
    });
    assert_eq!((shared.compiled(), shared.read()), (6, 0));
}

#[test]
fn a_read_only_cache_stores_nothing_and_causes_no_error() {
    if !compiler() {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let cache = Cache::at(folder.path().join("cubins")).expect("a private folder");
    std::fs::remove_dir(cache.folder()).expect("own folder");
    std::fs::write(cache.folder(), "no folder").expect("own folder");
    let (first, compiled, _) = anew(&cache, &["a", "b"]);
    assert_eq!((compiled, anew(&cache, &["a", "b"])), (2, (first, 2, 0)));
}

#[test]
fn the_first_of_several_refused_functions_is_reported() {
    if !compiler() {
        return;
    }
    let broken = |name: &str| Function {
        name: name.into(),
        source: format!("extern \"C\" __global__ void {name}() {{ undeclared = 1; }}"),
    };
    let functions = [
        add("a"),
        broken("first_broken"),
        add("b"),
        broken("second_broken"),
        add("c"),
    ];
    for threads in [1, 4] {
        let compiler = Compiler::default();
        compiler.set_threads(threads);
        let error = compiler
            .compile(None, &Program::each(PRELUDE, &functions, 90))
            .expect_err("it uses an undefined name");
        assert!(
            matches!(&error, Error::Refused { names, .. } if names == "first_broken"),
            "{error}"
        );
        assert!(
            error
                .to_string()
                .contains("the generated kernel first_broken for sm_90"),
            "{error}"
        );
        // The refusal does not affect the other functions.
        compiler
            .compile(None, &each(&["a", "b", "c"]))
            .expect("the source is fine");
        assert_eq!(compiler.compiled(), 3);
    }
    let own = format!("slabwise-refused-{}-", std::process::id());
    for file in std::fs::read_dir(std::env::temp_dir())
        .expect("a folder")
        .flatten()
    {
        let ours = file.file_name().to_string_lossy().starts_with(&own);
        if ours && std::fs::read_to_string(file.path()).is_ok_and(|text| text.contains("_broken()"))
        {
            std::fs::remove_file(file.path()).expect("it was there");
        }
    }
}

/// New headers, if the compiler writes any.
fn headers() -> Option<PrecompiledHeaders> {
    let version = nvrtc::version().expect("there is one");
    let made = PrecompiledHeaders::new(version);
    assert_eq!(made.is_some(), version >= (12, 8));
    made
}

#[test]
fn precompiled_headers_are_written_once_and_leave_the_code_as_it_is() {
    if !compiler() {
        return;
    }
    let Some(headers) = headers() else { return };
    let folder = headers.folder().to_path_buf();
    for sm in [80, 90] {
        let mut files = Vec::new();
        for name in ["a", "b", "c"] {
            let program = Program::new(WHOLE_PRELUDE, &[add(name)], sm);
            let alone = nvrtc::compile(&program, None).expect("the source is fine");
            let made = nvrtc::compile(&program, Some(&headers)).expect("the source is fine");
            assert_eq!(made, alone, "{name} for sm_{sm}");
            files.push(std::fs::read_dir(&folder).expect("a folder").count());
        }
        assert!(files[0] > 0 && files == [files[0]; 3], "{files:?}");
    }
    drop(headers);
    assert!(!folder.exists());
}

#[test]
fn without_their_folder_precompiled_headers_are_left_out() {
    if !compiler() {
        return;
    }
    let Some(headers) = headers() else { return };
    std::fs::remove_dir(headers.folder()).expect("it is empty");
    for program in each(&["a", "b"]) {
        let made = nvrtc::compile(&program, Some(&headers)).expect("the source is fine");
        assert_eq!(made, nvrtc::compile(&program, None).expect("as before"));
    }
    assert!(!headers.folder().exists());
}

/// The code of a custom kernel may include files, which are not in the key of an entry.
#[test]
fn code_that_includes_a_file_is_compiled_anew() {
    if !compiler() {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let cache = Cache::at(folder.path().join("cubins")).expect("a private folder");
    let file = folder.path().join("value.cuh");
    let includes = [
        format!("#include \"{}\"", file.display()),
        format!(" # /* a comment */ inc\\\nlude \"{}\"", file.display()),
        format!("%:include \"{}\"", file.display()),
        format!(
            "#if __has_include(\"{}\")\n*out = 1.0f;\n#else\n*out = 2.0f;\n#endif",
            file.display()
        ),
    ];
    for (at, include) in includes.iter().enumerate() {
        let name = format!("including_{at}");
        let source = format!("extern \"C\" __global__ void {name}(float* out) {{\n{include}\n}}\n");
        let functions = [Function { name, source }, add("a")];
        let programs = Program::each(PRELUDE, &functions, 90);
        let same_process = Compiler::default();
        let compiled = |compiler: &Compiler| {
            let code = compiler.compile(Some(&cache), &programs);
            code.expect("the source is fine")[0].image.clone()
        };
        std::fs::write(&file, "*out = 1.0f;\n").expect("own folder");
        let first = [compiled(&same_process), compiled(&Compiler::default())];
        assert_eq!(first[0], first[1], "{include}");
        match include.contains("has_include") {
            true => std::fs::remove_file(&file),
            false => std::fs::write(&file, "*out = 2.0f;\n"),
        }
        .expect("own folder");
        let second = [compiled(&same_process), compiled(&Compiler::default())];
        assert!(second[0] == second[1] && second != first, "{include}");
        assert_eq!(entries(&cache).len(), 1, "that of the other function");
    }
}

const FOLDER: &str = "SLABWISE_TEST_CUBINS";
const MANY: [&str; 6] = ["a", "b", "c", "d", "e", "f"];

#[test]
#[ignore = "one of several processes, which another test starts"]
fn a_process_among_others() {
    let cache = Cache::at(std::env::var_os(FOLDER).expect("the other test says where"))
        .expect("a private folder");
    for round in 0..3 {
        let (code, compiled, read) = anew(&cache, &MANY);
        assert!(code.iter().all(|code| code.image.starts_with(b"\x7fELF")));
        assert_eq!(compiled + read, MANY.len());
        assert!(round == 0 || compiled == 0, "all are kept");
    }
}

#[test]
fn concurrent_processes_share_one_cache() {
    if !compiler() {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let cubins = folder.path().join("cubins");
    let process = || {
        let mut command = Command::new(std::env::current_exe().expect("a path"));
        command
            .args(["--exact", "a_process_among_others", "--ignored"])
            .env(FOLDER, &cubins);
        command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("it starts")
    };
    for process in [process(), process(), process()] {
        let output = process.wait_with_output().expect("it ends");
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stdout)
        );
    }
    let cache = Cache::at(&cubins).expect("a private folder");
    assert_eq!(
        entries(&cache).len(),
        MANY.len(),
        "nothing half written stays"
    );
    assert_eq!(anew(&cache, &MANY).1, 0, "every entry is whole");
}
