//! The console of one member shows the sum over all of them, without Redis.

use serde_json::Value;

use super::members::Members;
use crate::support::{server::agent, wait_for_async};

const RULES: &str = "domain: d\ndescriptors:\n- { key: window, rate_limit: { unit: year, requests_per_unit: 9 } }\n";

#[tokio::test]
async fn tables_of_peers_are_summed() {
    let members = Members::start(2, RULES).await;
    let [one, two] = &members.all[..] else { panic!("there are two members") };
    let call = |method: &str, body: &str| {
        let url = one.server.url(&format!("/v1/{method}"));
        agent().post(url).send(body.as_bytes()).unwrap()
    };
    let json = |method: &str, body: &str| {
        let text = call(method, body).body_mut().read_to_string().unwrap();
        serde_json::from_str::<Value>(&text).unwrap()
    };
    assert_eq!(json("GetSession", "{}")["hasInstances"], true);
    // Reports are exchanged for as long as an operator watches.
    let viewer = call("WatchActivity", r#"{"allInstances": true}"#);
    one.take("window", 5).await;
    two.take("window", 7).await;
    let request = r#"{"allInstances": true, "rankBy": "RANK_BY_REQUESTED"}"#;
    let top = wait_for_async("the entities of both members", async || {
        let top = json("ListTopEntities", request);
        (top["totalHits"].as_str() == Some("12")).then_some(top)
    })
    .await;
    assert_eq!(top["instances"].as_array().unwrap().len(), 2, "{top}");
    let own = json("ListTopEntities", r#"{"rankBy": "RANK_BY_REQUESTED"}"#);
    assert_eq!((own["totalHits"].as_str(), own["instances"].as_array().unwrap().len()), (Some("5"), 1), "{own}");
    drop(viewer);
}
