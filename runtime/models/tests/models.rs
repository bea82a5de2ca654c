//! Names, sizes and made-up batches of the built-in models.

use slabwise::{DType, Device, Error, Params, Session, Trace};
use slabwise_models::{Examples, Gpt, Llama, Model, OptimizerKind};

#[test]
fn models_have_as_many_weights_as_their_descriptions_say() {
    let counts = [
        535_818,
        1_663_370,
        272_474,
        11_279_112,
        25_557_032,
        3_504_872,
        31_037_698,
        138_357_544,
        3_716_608,
        444_544,
        124_439_808,
    ];
    for (&model, weights) in Model::ALL
        .iter()
        .chain(&[Model::Gpt(Gpt::GPT2)])
        .zip(counts)
    {
        let params = Params::seeded(0);
        model.build(&params);
        let trained = params.declared().into_iter().filter(|p| p.is_trained());
        let counted: usize = trained.map(|p| p.dims().iter().product::<usize>()).sum();
        assert_eq!(counted, weights, "{model}");
        assert!(
            params.mistakes().is_empty(),
            "{model}: {:?}",
            params.mistakes()
        );
    }
}

#[test]
fn names_are_read_and_unknown_ones_are_refused() {
    assert!(
        Model::ALL
            .iter()
            .all(|&m| Model::parse(m.name()).is_ok_and(|read| read == m))
    );
    assert!(
        OptimizerKind::ALL
            .iter()
            .all(|&o| OptimizerKind::parse(o.name()).is_ok_and(|read| read == o))
    );
    let text = Model::parse("resnet99").unwrap_err().to_string();
    assert!(
        text.starts_with("unknown model \"resnet99\"; there are mlp, cnn, resnet20, "),
        "{text}"
    );
    assert_eq!(Model::parse("gpt2").unwrap(), Model::Gpt(Gpt::GPT2));
    let sized = Gpt {
        layers: 6,
        heads: 8,
        tied: true,
        ..Gpt::SMALL
    };
    assert_eq!(
        Model::parse("gpt:layers=6, heads=8,tied=true").unwrap(),
        Model::Gpt(sized)
    );
    assert_eq!(
        Model::parse("lstm:layers=1,length=32").unwrap(),
        Model::Lstm
    );
    let long = Model::parse("lstm: length = 320 ,layers=2").unwrap();
    assert_eq!(
        (long.to_string(), long.name(), long.example()),
        ("lstm:length=320,layers=2".into(), "lstm", vec![320])
    );
    assert_eq!(Model::parse(&long.to_string()).unwrap(), long);
    assert_eq!(
        Model::parse("gpt2:tied=false,length=128")
            .unwrap()
            .to_string(),
        "gpt:layers=12,width=768,heads=12,vocabulary=50257"
    );
}

/// The message for each wrong size.
#[test]
fn sizes_are_refused_by_name() {
    let said = |text: &str| Model::parse(text).unwrap_err().to_string();
    for (text, expected) in [
        (
            "gpt:depth=3",
            "gpt has no size \"depth\"; there are layers, width, heads, length, vocabulary, tied",
        ),
        (
            "gpt:layers=x",
            "gpt: layers is \"x\", not a number from 1 to 1000",
        ),
        (
            "gpt:layers",
            "gpt: layers is \"\", not a number from 1 to 1000",
        ),
        (
            "gpt:heads=0",
            "gpt: heads is \"0\", not a number from 1 to 65536",
        ),
        ("gpt:tied=1", "gpt: tied is \"1\", not true or false"),
        (
            "gpt:width=100,heads=3",
            "gpt: a width of 100 does not divide into 3 heads",
        ),
        ("gpt:layers=1,layers=2", "gpt: layers is given twice"),
        (
            "gpt:width=64,,layers=2",
            "gpt:width=64,,layers=2: a size is missing; there are layers, width, heads, length, vocabulary, tied, as in gpt:layers=4",
        ),
        (
            "mlp:",
            "mlp:: a size is missing; there are inputs, hidden1, hidden2, classes, as in mlp:inputs=784",
        ),
        (
            "gpt:length=1000000",
            "gpt: length is \"1000000\", not a number from 1 to 65536",
        ),
        (
            "gpt:layers=1000,length=1000",
            "gpt: 1000 layers over a length of 1000 are more than 262144 places",
        ),
        (
            "lstm:length=99999999999999999999",
            "lstm: length is \"99999999999999999999\", not a number from 1 to 10000",
        ),
        (
            "lstm:length=5000,layers=3",
            "lstm: a length of 5000 and 3 layers make 15000 steps, more than 10000",
        ),
        ("cnn:size=30", "cnn: a size of 30 is not halved twice"),
        ("unet:size=40", "unet: a size of 40 is not halved 4 times"),
        (
            "vgg16:size=31",
            "vgg16: a size of 31 is not halved five times",
        ),
        (
            "resnet20:blocks4=1",
            "resnet20 has no size \"blocks4\"; there are size, classes, width, blocks1, blocks2, blocks3",
        ),
    ] {
        assert_eq!(said(text), expected);
    }
    for line in Model::help().lines() {
        let model = Model::parse(line.trim()).unwrap();
        assert_eq!(model.name(), line.trim().split(':').next().unwrap());
        assert!(!model.to_string().contains(':'), "{model}");
    }
}

/// The largest sizes that are accepted give a graph or an error, no overflow.
#[test]
fn the_largest_sizes_do_not_overflow() {
    for line in Model::help().lines() {
        let (name, keys) = line.trim().split_once(':').unwrap();
        for key in keys.split(',').map(|key| key.split('=').next().unwrap()) {
            if [
                "layers", "length", "steps", "blocks", "blocks1", "blocks2", "blocks3", "blocks4",
                "tied",
            ]
            .contains(&key)
            {
                continue;
            }
            let most = Model::parse(&format!("{name}:{key}=x"))
                .unwrap_err()
                .to_string();
            let most = most.rsplit(' ').next().unwrap().to_string();
            let Ok(model) = Model::parse(&format!("{name}:{key}={most}")) else {
                continue;
            };
            let params = Params::seeded(0);
            let network = model.build(&params);
            let session = Session::new(Device::Cpu, params).unwrap();
            let planned = network.plan_training(&session, 1u32, model.optimizer());
            assert!(
                !matches!(planned, Err(Error::Internal(_))),
                "{model}: {:?}",
                planned.err()
            );
        }
    }
}

#[test]
fn made_up_batches_fit_and_repeat() {
    let (examples, labels) = Model::Cnn.batch(7, 3);
    let Examples::Images(images) = &examples else {
        panic!("cnn reads images")
    };
    assert_eq!((images.shape(), labels.len()), (&[7, 1, 28, 28][..], 7));
    assert!(
        images.iter().all(|x| (0.0..1.0).contains(x)) && labels.iter().all(|l| (0..10).contains(l))
    );
    assert_eq!((examples, labels), Model::Cnn.batch(7, 3));
    assert_ne!(Model::Cnn.batch(7, 3), Model::Cnn.batch(7, 4));
    let (Examples::Tokens(tokens), labels) = Model::Lstm.batch(3, 1) else {
        panic!("lstm reads tokens")
    };
    assert_eq!(
        (tokens.shape(), labels.shape()),
        (&[3, 32][..], &[3, 32][..])
    );
    assert!(tokens.iter().chain(&labels).all(|t| (0..128).contains(t)));
}

/// Reading a token costs the same however much text there was before it and however long it may
/// become, except for attention over that text and its cache.
#[test]
fn a_token_costs_the_same_at_every_length_but_for_attention() {
    let sizes = Llama {
        layers: 2,
        width: 32,
        heads: 4,
        key_heads: 2,
        inner: 48,
        vocabulary: 50,
        ..Llama::SMALL
    };
    let costs = |capacity: usize| {
        let params = Params::seeded(0);
        let decoder = sizes.layers(&params.root());
        let trace = Trace::inference();
        let logits = decoder.continued(trace.input("token", DType::I32, (1, 1)), capacity);
        let mut session = Session::new(Device::Cpu, params).expect("a session");
        let program = session.compile(&trace, [logits]).expect("it compiles");
        let token = ndarray::Array2::<i32>::from_elem((1, 1), 7);
        let kernels = session
            .profile(&program, (&token,), 1)
            .expect("a run")
            .kernels;
        let costs = kernels.into_iter().map(|k| (k.name, k.flops, k.bytes));
        costs.collect::<Vec<_>>()
    };
    let (short, long) = (costs(64), costs(512));
    assert_eq!(short.len(), long.len());
    let grown: Vec<&str> = short
        .iter()
        .zip(&long)
        .filter(|(a, b)| a != b)
        .map(|(a, _)| &*a.0)
        .collect();
    // One kernel in each block, named after the query's layer.
    assert_eq!(grown.len(), sizes.layers, "{grown:?}");
    let is_attention = |name: &&str| name.contains("self_attn.q_proj");
    assert!(grown.iter().all(is_attention), "{grown:?}");
}
