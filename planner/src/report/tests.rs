use super::*;
use crate::dag::{Buffer, Kind, MayReuse, Task};
use crate::{Options, plan};

fn sample() -> Dag {
    let mut dag = Dag::new();
    let x = dag.add_buffer(Buffer {
        live_in: true,
        ..Buffer::new("images", Kind::Input, 1 << 20)
    });
    let source = "model.rs:7 <\"stem\" & 'body'>".to_owned();
    let h = dag.add_buffer(Buffer {
        source,
        ..Buffer::new("stem<conv>&\u{1}", Kind::Activation, 2 << 20)
    });
    let r = dag.add_buffer(Buffer::new("stem.relu", Kind::Activation, 2 << 20));
    let y = dag.add_buffer(Buffer {
        live_out: true,
        ..Buffer::new("logits", Kind::Output, 4 << 10)
    });
    dag.add_task(Task {
        workspace: 300 << 10,
        ..Task::new("conv", &[x], &[h])
    });
    let relu = dag.add_task(Task::new("relu", &[h], &[r]));
    dag.add_task(Task::new("dense", &[r], &[y]));
    dag.may_reuse.push(MayReuse {
        task: relu,
        from: h,
        to: r,
    });
    dag
}

#[test]
fn text_names_sizes_savings_peak_and_methods() {
    let dag = sample();
    let best = plan(&dag, &Options::default()).expect("a valid dag");
    let expected = "\
slab         3.3 MiB · lower bound 3.3 MiB · fragmentation 0.0 % · without reuse 5.3 MiB
saved by     reuse 1.3 MiB · in-place 724.0 KiB (1)
peak         step 0 conv: stem<conv>&\u{1} 2.0 MiB, images 1.0 MiB, workspace of conv 300.0 KiB
made by      program order of 3 tasks · skyline by total, area, width";
    assert_eq!(text(&dag, &best).to_string(), expected);
    let line = best.to_string();
    assert_eq!(line.lines().count(), 1);
    assert!(
        line.starts_with("slab 3.3 MiB · lower bound") && line.contains("program order of 3 tasks"),
        "{line}"
    );

    let apart = plan(
        &dag,
        &Options {
            reuse: false,
            ..Options::default()
        },
    )
    .expect("a valid dag");
    let shown = text(&dag, &apart).to_string();
    assert!(
        shown.contains("saved by     reuse 0 B · in-place 0 B (0)")
            && shown.ends_with("· without reuse"),
        "{shown}"
    );
}

#[test]
fn many_holders_are_summed_up() {
    let mut dag = Dag::new();
    for i in 0..10 {
        dag.add_buffer(Buffer {
            live_in: true,
            ..Buffer::new(format!("b{i}"), Kind::Input, 640)
        });
    }
    let plan = plan(&dag, &Options::default()).expect("a valid dag");
    let shown = text(&dag, &plan).to_string();
    assert!(
        shown.contains("peak         step 0: b0 640 B, b1 640 B")
            && shown.contains("b5 640 B, 4 more 2.5 KiB"),
        "{shown}"
    );
}

/// The elements of an XML text, if each is closed by its name and text and attributes contain no
/// markup characters.
fn elements(xml: &str) -> Vec<String> {
    let (mut open, mut elements, mut rest) = (Vec::new(), Vec::new(), xml);
    while let Some(start) = rest.find('<') {
        let entities = |text: &str| {
            text.split('&').skip(1).all(|after| {
                ["amp;", "lt;", "gt;", "quot;", "apos;"]
                    .iter()
                    .any(|entity| after.starts_with(entity))
            })
        };
        assert!(entities(&rest[..start]), "{}", &rest[..start]);
        let end = start + rest[start..].find('>').expect("a tag ends");
        let tag = &rest[start + 1..end];
        rest = &rest[end + 1..];
        assert!(
            !tag.contains('<') && tag.matches('"').count() % 2 == 0 && entities(tag),
            "{tag}"
        );
        if let Some(name) = tag.strip_prefix('/') {
            assert_eq!(open.pop(), Some(name));
            continue;
        }
        let name = tag.split([' ', '/']).next().expect("a name");
        elements.push(name.to_owned());
        if !tag.ends_with('/') {
            open.push(name);
        }
    }
    assert!(open.is_empty() && rest.trim().is_empty());
    elements
}

#[test]
fn the_diagram_is_well_formed_and_shows_every_buffer() {
    let dag = sample();
    for options in [
        Options::default(),
        Options {
            reuse: false,
            ..Options::default()
        },
    ] {
        let plan = plan(&dag, &options).expect("a valid dag");
        let picture = svg(&dag, &plan, "a < b & \"c\"");
        let elements = elements(&picture);
        assert_eq!(elements[0], "svg");
        // A tooltip for each of four buffers, one workspace and three steps.
        assert_eq!(elements.iter().filter(|name| *name == "title").count(), 8);
        assert_eq!(picture.matches("class=\"b\"").count(), 5);
        for text in [
            "a &lt; b &amp; &quot;c&quot;",
            "stem&lt;conv&gt;&amp;\u{fffd}",
            "model.rs:7 &lt;&quot;stem&quot; &amp; &apos;body&apos;&gt;",
            "workspace of conv",
            "2.0 MiB = 2097152 bytes",
            ">activation</text>",
            ">output</text>",
        ] {
            assert!(picture.contains(text), "{text}");
        }
        assert!(
            !picture.contains(">gradient</text>"),
            "the legend lists only kinds that appear"
        );
        assert_eq!(picture.contains("computed in place"), options.reuse);
    }
}

#[test]
fn diagrams_of_no_buffers_and_of_many() {
    let empty = Dag::new();
    let plan_of = |dag: &Dag| plan(dag, &Options::default()).expect("a valid dag");
    elements(&svg(&empty, &plan_of(&empty), ""));
    let mut dag = Dag::new();
    let mut last = dag.add_buffer(Buffer {
        live_in: true,
        ..Buffer::new("in", Kind::Input, u64::MAX / 4096)
    });
    for i in 0..700 {
        let next = dag.add_buffer(Buffer::new(format!("b{i}"), Kind::Activation, 64 + i));
        dag.add_task(Task::new(format!("t{i}"), &[last], &[next]));
        last = next;
    }
    let picture = svg(&dag, &plan_of(&dag), "much");
    assert_eq!(
        elements(&picture)
            .iter()
            .filter(|name| *name == "title")
            .count(),
        701 + 700
    );
    assert!(!picture.contains("NaN") && !picture.contains("inf"));
}
